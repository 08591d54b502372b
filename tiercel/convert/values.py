"""Read what a command gives: files, mappings and numbers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiercel.config.yaml_text import YamlProblem, parse


def file_in(folders: Sequence[Path], path: str) -> Path | None:
    """Find a file by its name in one of the folders."""
    if "\0" in path or len(path) > 1024 or any(len(part) > 255 for part in path.split("/")):
        return None
    return next((place for folder in folders if (place := folder / path).is_file()), None)


def mapping_in(
    source: Path | str | None, read: Callable[[str], Any] = lambda text: parse(text)[0]
) -> dict[Any, Any] | None:
    """Read a mapping from a file or a text, as YAML unless another form is named; None if it is not one."""
    try:
        text = source.read_text(encoding="utf-8-sig") if isinstance(source, Path) else source
        tree = None if text is None else read(text)
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def value_in(word: str) -> Any:
    """Read a word as YAML. What is not YAML is a text."""
    try:
        return parse(word)[0]
    except YamlProblem:
        return word


def number_of(label: str, word: str) -> int | float:
    """Read a number. Raises ValueError, with the label, if the word is not a number."""
    value = value_in(word)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{label} {word} is not a number; use a number instead")
    return value


def whole_number_of(label: str, word: str) -> int:
    """Read a whole number; 3.0 is one. Raises ValueError, with the label, if the word is not a whole number."""
    value = number_of(label, word)
    if value != int(value):
        raise ValueError(f"{label} {word} is not a whole number; use a number instead")
    return int(value)


def split_count(source: str) -> tuple[str, int | None]:
    """Split `path#N` into the path and its number of rows, which is None if it is not given."""
    path, mark, count = source.rpartition("#")
    return (path, int(count)) if mark and count.isdecimal() else (source, None)
