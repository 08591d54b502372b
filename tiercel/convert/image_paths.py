"""Convert where the images of rows are looked for.

ms-swift resolves relative paths in the working directory, then in ROOT_IMAGE_DIR, and opens any absolute path and URL.
tiercel resolves them in data.image_root, or else beside the rows, and opens nothing elsewhere.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import dirname, exists, join, realpath
from typing import Any

from tiercel.config.row_sources import row_source
from tiercel.convert.draft import RecipeDraft
from tiercel.data.readers import records_of
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.wording import LONGEST_PATH

_COLUMNS = ("images", "image", "rejected_images", "videos", "video", "image_url")
_PATHS = ("path", "url")  # keys of an object in such a column
_ROWS = 100  # the most rows of a file that are looked at
_MOST_BYTES = 100_000_000  # the largest .json file, which is read whole
_SHOWN = 5  # the most directories in a note


@dataclass(frozen=True, kw_only=True, slots=True)
class _Looked:
    """A file of rows: its directory, and the paths of images and videos in its first rows; None if it cannot be
    read."""

    folder: str
    paths: tuple[str, ...] | None

    @property
    def relative(self) -> list[str]:
        return [path for path in self.paths or () if not path.startswith("/") and not _is_address(path)]

    @property
    def absolute(self) -> list[str]:
        return [path for path in self.paths or () if path.startswith("/")]


def set_image_root(draft: RecipeDraft) -> None:
    """Set the directory that relative paths start in, and add notes on what tiercel would not open."""
    if draft.launch.framework != "ms-swift":
        return
    root = draft.launch.environment.get("ROOT_IMAGE_DIR")
    looked = [_looked(draft, path) for path in _files(draft)]
    if root:
        draft.set("data.image_root", root, "ROOT_IMAGE_DIR")
        _searched_first(draft, root, looked)
    else:
        _working_directory(draft, looked)
    _not_opened(draft, looked)


def _files(draft: RecipeDraft) -> Iterator[str]:
    """Yield the files of rows that the recipe has."""
    more = [entry["path"] for entry in draft.values.get("data.mix", [])]
    for name in (draft.values.get("data.train"), *more, draft.values.get("data.eval")):
        if isinstance(name, str) and not name.startswith("hf:"):
            path, mark, count = name.rpartition("#")
            yield path if mark and count.isdigit() else name


def _looked(draft: RecipeDraft, path: str) -> _Looked:
    file = draft.launch.file(path)
    if file is None:
        return _Looked(folder=dirname(path), paths=None)
    if file.suffix.lower() == ".json" and file.stat().st_size > _MOST_BYTES:
        return _Looked(folder=str(file.parent), paths=None)
    try:
        rows = [record.value for record in islice(records_of(row_source(str(file))), _ROWS)]
        paths = tuple(dict.fromkeys(_paths_in(rows)))
    except (DataError, EnvironmentProblem, OSError, RecursionError):
        paths = None
    return _Looked(folder=str(file.parent), paths=paths)


def _paths_in(value: Any, is_named: bool = False) -> Iterator[str]:
    """Yield the texts in columns of images and videos; an image that is embedded in the row has no path."""
    if isinstance(value, str) and is_named:
        if value and len(value) <= LONGEST_PATH and value.isprintable() and not value.startswith("data:"):
            yield value
    elif isinstance(value, dict) and not (is_named and value.get("bytes")):
        for name, inner in value.items():
            yield from _paths_in(inner, name in _COLUMNS or (is_named and name in _PATHS))
    elif isinstance(value, list):
        for inner in value:
            yield from _paths_in(inner, is_named)


def _is_address(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _searched_first(draft: RecipeDraft, root: str, looked: Sequence[_Looked]) -> None:
    every = [path for each in looked for path in each.relative]
    if first := next((path for path in every if exists(path) and not exists(join(root, path))), None):
        text = f"the working directory has {first} and comes first there; here data.image_root alone is searched"
        draft.note(text, "ROOT_IMAGE_DIR")


def _working_directory(draft: RecipeDraft, looked: Sequence[_Looked]) -> None:
    """Let relative paths start in the working directory if the rows are in another one."""
    away = [each for each in looked if realpath(each.folder) != os.getcwd()]
    relative = [(each.folder, path) for each in away for path in each.relative]
    if any(exists(path) or not exists(join(folder, path)) for folder, path in relative):
        draft.set("data.image_root", ".", remark="ms-swift starts relative paths of images in the working directory")
    elif any(each.paths is None for each in away):
        text = "start in the working directory there, and beside the rows here; for the same write data.image_root: ."
        draft.note(text, subject="relative paths of images in the rows")


def _not_opened(draft: RecipeDraft, looked: Sequence[_Looked]) -> None:
    """Add notes on absolute paths outside the directories that tiercel opens, and on addresses."""
    given = draft.values.get("data.image_root")
    strange: set[str] = set()
    for each in looked:
        root = realpath(given or each.folder)
        folders = map(dirname, each.absolute)
        strange |= {folder for folder in folders if not f"{realpath(folder)}/".startswith(f"{root}/")}
    if strange:
        common = os.path.commonpath(strange)
        named = [common] if common != "/" else sorted(strange)[:_SHOWN]
        text = f"are opened only where a key names their directory: data.image_roots: [{', '.join(named)}]"
        draft.note(text, subject="absolute paths of images in the rows")
    if any(_is_address(path) for each in looked for path in each.paths or ()):
        text = "tiercel downloads none; save them as files"
        draft.note(text, subject="images in the rows by URL")
