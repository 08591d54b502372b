"""`tiercel data`: commands on the rows of a recipe."""

from argparse import Namespace
from collections.abc import Callable

from tiercel.config import Recipe
from tiercel.data.fetch import FAILED, fetch
from tiercel.data.media.download import Web
from tiercel.data.reading import require_few_bad
from tiercel.log import printed
from tiercel.message_text import counted


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Run the command of `tiercel data` that the command line names."""
    LOOKS[arguments.look](recipe, arguments)


def _preview(recipe: Recipe, arguments: Namespace) -> None:
    from tiercel.cli.preview import run  # imported here because the other commands need no model

    run(recipe, arguments)


def _fetch(recipe: Recipe, arguments: Namespace) -> None:
    """Download the pictures that rows name by URLs. Raises DataError if more rows lack one than
    data.max_bad_fraction allows."""
    folder, data = arguments.to, recipe.data
    with printed():
        done = fetch(data, folder, Web(max_pixels=data.max_image_pixels), arguments.parallel)
    lacking = f"; {counted(len(done.failed), 'row')} without theirs: {folder / FAILED}" if done.failed else ""
    print(f"{folder}: {counted(done.downloaded, 'picture')} downloaded, {done.found:,} were there{lacking}")
    print("for the recipe:", *(f"{key}={value}" for key, value in done.values.items()), sep="\n  ")
    require_few_bad(len(done.failed), done.row_count, data, done.failed)


LOOKS: dict[str, Callable[[Recipe, Namespace], None]] = {"preview": _preview, "fetch": _fetch}
