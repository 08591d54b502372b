"""A console that prints in the user's language."""

from typing import Any

from rich.cells import cell_len
from rich.console import Console

from tiercel.messages import translated


class SpeakingConsole(Console):
    """Translates every text before it is printed. Other objects are printed as they are."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(translated(each) if isinstance(each, str) else each for each in objects), **options)


def padded(text: str, width: int) -> str:
    """Pad a text with spaces to a width in terminal columns, of which a Chinese character takes two."""
    return text + " " * max(0, width - cell_len(text))
