"""`tiercel data`: commands on the rows of a recipe."""

from argparse import Namespace
from collections.abc import Callable

from tiercel.config import Recipe


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Run the command of `tiercel data` that the command line names."""
    LOOKS[arguments.look](recipe, arguments)


def _preview(recipe: Recipe, arguments: Namespace) -> None:
    from tiercel.cli.preview import run  # imported here because the other commands need no model

    run(recipe, arguments)


LOOKS: dict[str, Callable[[Recipe, Namespace], None]] = {"preview": _preview}
