"""`tiercel data`: commands on the rows of a recipe."""

from argparse import Namespace
from collections.abc import Callable

from tiercel.config import Recipe
from tiercel.data.fetch import FAILED, fetch
from tiercel.data.index import FileStore
from tiercel.data.media.download import Web
from tiercel.data.reading import heldout_source, read_rows, read_run_rows, sources_of
from tiercel.data.rejected_rows import require_few_bad
from tiercel.data.row_table import RowTable
from tiercel.data.stores import view_of
from tiercel.log import printed
from tiercel.message_text import counted
from tiercel.runs.progress import waiting


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


def _index(recipe: Recipe, arguments: Namespace) -> None:
    """Make the indexes that the first start of a run would make. Raises DataError as that does."""
    data, purpose = recipe.data, recipe.purpose
    with printed():
        for key, (given, own) in {**sources_of(data), **heldout_source(data)}.items():
            print(f"{key}: {_index_in_words(read_rows(given, own, purpose))}")
        with waiting("comparing what the rows say, as a run does at its start"):
            tables = read_run_rows(data, purpose).tables
            for table in tables:
                table.identity()
    for table in tables:
        require_few_bad(len(table.rejected), table.total, data, table.rejected)


def _index_in_words(table: RowTable) -> str:
    """Return the numbers of rows, and where their indexes lie."""
    stores = view_of(table.rows).stores
    found = [store for store in stores if isinstance(store, FileStore)]
    held = counted(len(stores) - len(found), "file")
    said = f"{counted(table.total, 'row')}, {len(table.rows):,} usable, {len(table.rejected):,} rejected"
    if not found:
        return f"{said}; no index: {held} held in memory (docs/data.md#large-files)"
    place = found[0].path if len(found) == 1 else f"{len(found):,} files of {found[0].cache}"
    said += f"\n  index: {sum(store.size for store in found):,} bytes, in {place}"
    return said if len(found) == len(stores) else f"{said}; {held} held in memory"


LOOKS: dict[str, Callable[[Recipe, Namespace], None]] = {"preview": _preview, "fetch": _fetch, "index": _index}
