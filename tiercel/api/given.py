"""Objects passed in memory, written into the run directory: rows with their pictures, and functions. The recipe then
names files, so that `tiercel check` and a resume from the command line find what Python code passed."""

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tiercel.api.functions import named_function, written_function
from tiercel.data.class_labels import class_labels, decoded
from tiercel.data.media.file_names import ADDRESS_KEYS, visual_of
from tiercel.errors import DataError, RecipeError
from tiercel.log import logger
from tiercel.regular_files import open_new
from tiercel.rewards.runtime.in_process import register_function
from tiercel.runs.files import file_sha256, replacing
from tiercel.runs.fresh_start import GIVEN, require_own
from tiercel.writing import writing

PICTURES = ("image", "images")  # columns of pictures
MEDIA = (*PICTURES, "video", "videos")  # columns whose texts are files
ROWS_AT_ONCE = 10_000  # of a table, as Python's objects
MOST_FOLDERS = 8  # of media that a recipe lists one by one


def is_rows(value: Any) -> bool:
    """Return whether a value is rows rather than a path, a list of paths or a section of the recipe."""
    is_read = isinstance(value, Iterable) or _is_map_style(value)
    return is_read and not isinstance(value, str | Path | Mapping) and not are_paths(value)


def _is_map_style(value: Any) -> bool:
    """Return whether a value is a Dataset of torch that is read by numbers, which need not end by IndexError."""
    return not isinstance(value, Iterable) and all(hasattr(type(value), name) for name in ("__getitem__", "__len__"))


def are_paths(value: Any) -> bool:
    """Return whether a value is a list of paths."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str | Path) for each in value)


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A file of rows, and the directories of the pictures and videos that they name."""

    file: str
    media_folders: tuple[str, ...]

    def admitted(self, image_roots: Iterable[str]) -> list[str]:
        """Return `data.image_roots` with these directories: who passes rows in memory means their files."""
        return list(dict.fromkeys((*image_roots, *self.media_folders)))


def write_rows(rows: Iterable[Any], output: Path, image_root: str | None = None) -> WrittenRows:
    """Write rows as JSON lines, and their pictures next to them. The file's name contains a hash of its content, so
    that equal rows give the same recipe. Paths start in the working directory, or else in `image_root`. A
    `datasets.Dataset` is written as Arrow files, which are mapped, unless its rows name pictures by paths. Values that
    JSON does not have are left out, and told. Raises DataError if a row is not a mapping, or a picture is none."""
    folder = _folder(output)
    rows, layout = _each_row(rows), getattr(rows, "format", None)
    is_changed = isinstance(layout, Mapping) and layout.get("type") == "custom"  # by with_transform
    if hasattr(rows, "save_to_disk") and not is_changed and not _names_media(rows):
        return WrittenRows(str(_saved_table(rows, folder)), ())
    part = _part_of(folder / "rows")
    digest, writer = hashlib.sha256(), _RowWriter(folder, image_root is not None)
    with writing(part), _gone_after_an_error(part):
        with open_new(part, "wb") as file:
            for number, row in enumerate(_with_names(rows), start=1):
                line = (writer.line(row, number) + "\n").encode("utf-8", "replace")  # no half of a surrogate pair
                digest.update(line)
                file.write(line)
        path = folder / f"rows-{digest.hexdigest()[:16]}.jsonl"
        part.replace(path)
    return WrittenRows(str(path), _few(writer.media_folders))


def _part_of(path: Path) -> Path:
    """Return a temporary name of its own: ranks under torchrun write the same files at the same time."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def _gone_after_an_error(part: Path) -> Iterator[None]:
    """Remove what an error leaves half-written."""
    try:
        yield
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise


def _each_row(rows: Any) -> Any:
    """Return the rows of a table of polars, pyarrow or pandas, which iterates over columns; other rows as they are."""
    if not hasattr(rows, "columns"):
        return (rows[place] for place in range(len(rows))) if _is_map_style(rows) else rows
    if hasattr(rows, "iter_rows"):
        return rows.iter_rows(named=True)
    if hasattr(rows, "to_batches"):
        return (row for batch in rows.to_batches() for row in batch.to_pylist())
    if hasattr(rows, "iloc"):
        parts = (rows.iloc[start : start + ROWS_AT_ONCE] for start in range(0, len(rows), ROWS_AT_ONCE))
        return (row for part in parts for row in part.to_dict("records"))
    return rows


def _with_names(rows: Iterable[Any]) -> Iterable[Any]:
    """Return the rows, those of `datasets` with the names of their class labels, as files of `datasets` are read."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)
    labels = class_labels(schema.metadata) if schema is not None else {}
    return (decoded(row, labels, has_json=False) for row in rows) if labels else rows


def _names_media(table: Any) -> bool:
    """Return whether a `datasets.Dataset` has paths of pictures or videos."""
    return any(_has_paths(field.type, field.name) for field in table.features.arrow_schema)


def _has_paths(kind: Any, column: str) -> bool:
    """Return whether values of an Arrow type have paths of media: as text under such a name, not beside their bytes."""
    if hasattr(kind, "value_type"):  # a list
        return _has_paths(kind.value_type, column)
    inner = {field.name: field.type for field in (kind.field(number) for number in range(kind.num_fields))}
    if not inner:
        return column in MEDIA and "string" in str(kind)
    addresses = ADDRESS_KEYS if "type" in inner else ()
    return "bytes" not in inner and any(
        _has_paths(each, "image" if name in addresses else column) for name, each in inner.items()
    )


def _saved_table(table: Any, folder: Path) -> Path:
    """Write a `datasets.Dataset` batch by batch, pictures included, and return its directory."""
    part = _part_of(folder / "table")
    with writing(part), _gone_after_an_error(part):
        part.mkdir()
        table.save_to_disk(str(part))
        digest = hashlib.sha256()
        for file in sorted(part.glob("*.arrow")):
            digest.update(file_sha256(file).encode())
        path = folder / f"rows-{digest.hexdigest()[:16]}"
        try:
            part.rename(path)
        except OSError:  # it is there
            if not path.is_dir():
                raise
            shutil.rmtree(part)
    return path


def _few(folders: Iterable[str]) -> tuple[str, ...]:
    """Return these directories, or the one that contains them all if they are many."""
    found = tuple(sorted(folders))
    common = os.path.commonpath(found) if len(found) > MOST_FOLDERS else "/"
    return found if os.path.dirname(common) == common else (common,)


def _folder(output: Path) -> Path:
    """Create the folder for these files inside the run's own directory. Raises RunError if the directory is somebody
    else's."""
    require_own(output)
    folder = output / GIVEN
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


class _RowWriter:
    """Turns rows into lines of JSON. `media_folders` are the directories of the files that the rows name. With
    `is_rooted`, paths that are no files here start in data.image_root."""

    def __init__(self, folder: Path, is_rooted: bool):
        self.folder, self.is_rooted = folder, is_rooted
        self.media_folders: set[str] = set()
        self.told: set[str] = set()  # columns with a value that JSON does not have

    def line(self, row: Any, number: int) -> str:
        if not isinstance(row, Mapping):
            raise DataError(f"data: row {number} is a {type(row).__name__}, but each row must be a dict of its columns")
        try:
            plain = {name: self._plain(value, name) for name, value in row.items()}
        except (TypeError, ValueError) as error:
            raise DataError(f"data: row {number} cannot be written as JSON: {error}") from error
        try:
            return json.dumps(plain, ensure_ascii=False)
        except (TypeError, ValueError):
            held = {name: self._in_json(value, name, number) for name, value in plain.items()}
            return json.dumps(held, ensure_ascii=False)

    def _in_json(self, value: Any, column: str, number: int) -> Any:
        """Return a value, or None for one that JSON does not have, such as a date; a row that needs it is rejected."""
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            if column not in self.told:
                self.told.add(column)
                logger.warning(f"data: values of the column {column} are left out, as in row {number}: {error}")
            return None
        return value

    def _plain(self, value: Any, column: str) -> Any:
        """Return a value that JSON can represent. Pictures become files, and paths of media become absolute."""
        if (picture := _encoded(value, column)) is not None:
            path = _saved(picture, self.folder)  # named relative to the rows, so that the run may be moved
            return self._named(path) if self.is_rooted else str(path.relative_to(self.folder))
        if isinstance(value, Mapping):
            kind, addresses = visual_of(value)
            return {name: self._plain(each, kind if name in addresses else column) for name, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [self._plain(each, column) for each in value]
        if isinstance(value, Path) or (isinstance(value, str) and column in MEDIA and "://" not in value[:10]):
            # A missing picture is named where it was looked for; a text without an ending is no name of a file.
            is_lost = not self.is_rooted and "." in str(value)[-6:] and os.path.isdir(os.path.dirname(value) or ".")
            return self._named(Path(value)) if is_lost or os.path.isfile(value) else str(value)
        if hasattr(value, "tolist"):  # numbers and arrays of numpy
            plain = value.tolist()
            return self._plain(plain, column) if isinstance(plain, list | float) else plain
        return None if isinstance(value, float) and math.isnan(value) else value  # which pandas has for a missing value

    def _named(self, path: Path) -> str:
        self.media_folders |= {str(path.absolute().parent), os.path.dirname(os.path.realpath(path))}  # of a link, too
        return str(path.absolute())


def _encoded(value: Any, column: str) -> bytes | None:
    """Return the file of a picture: of a Pillow image, of one that `datasets` has not decoded, and of the bytes of a
    file and an array (height, width[, colours]) of uint8 in a column of pictures. None for anything else."""
    if hasattr(value, "tobytes") and hasattr(value, "save"):
        return _png(value)
    if isinstance(value, Mapping):
        value, column = value.get("bytes"), PICTURES[0]
    if column in PICTURES and str(getattr(value, "dtype", "")) == "uint8" and value.ndim in (2, 3):
        return _png(_of_array(value))
    return value if column in PICTURES and isinstance(value, bytes) else None


def _of_array(array: Any) -> Image.Image:
    try:
        return Image.fromarray(array)
    except TypeError as error:
        shape = " x ".join(map(str, array.shape))
        raise ValueError(f"an array of {shape} is not a picture; it must be height x width x 3") from error


def _png(image: Image.Image) -> bytes:
    from tiercel.image_decoding import png_file  # only now, because it needs numpy

    return png_file(image)


def _saved(data: bytes, folder: Path) -> Path:
    path = folder / "images" / hashlib.sha256(data).hexdigest()
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        with writing(path), replacing(path, _part_of(path)) as file:
            file.write(data)
    return path


def write_functions(tree: Any, output: Path) -> Any:
    """Return a recipe's plain data with each function replaced by the text that names it: in its own module, or in the
    file that it is written to. A reward that cannot be written, such as an object's method, is called in this process.
    Raises RecipeError for a function that can neither be named nor called here."""
    return _FunctionWriter(output).written(tree)


class _FunctionWriter:
    """Replaces the functions of one recipe. `here` are those that are called in this process, by their names."""

    def __init__(self, output: Path):
        self.output = output
        self.here: dict[str, Any] = {}

    def written(self, tree: Any, *, may_run_here: bool = False) -> Any:
        if isinstance(tree, Mapping):
            return {
                name: self.written(value, may_run_here=may_run_here or name == "rewards")
                for name, value in tree.items()
            }
        if isinstance(tree, list | tuple):
            return [self.written(value, may_run_here=may_run_here) for value in tree]
        return self._named(tree, may_run_here) if callable(tree) else tree

    def _named(self, function: Any, may_run_here: bool) -> str:
        if (call := named_function(function)) is not None:
            return call
        name = getattr(function, "__name__", type(function).__name__)
        source, reason = written_function(function)
        if source is not None:
            path = _folder(self.output) / f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
            if not path.is_file():
                with writing(path), replacing(path, _part_of(path)) as file:
                    file.write(source.encode())
            return f"{path}:{name}"
        if may_run_here:
            logger.info(f"{name} runs in this process, without limits of time and memory: {reason}")
            return register_function(function, self._name_here(function, name), self.output)
        raise RecipeError([f'{name}: {reason}; put it into a file, and pass "file.py:{name}"'])

    def _name_here(self, function: Any, name: str) -> str:
        """Return a name that no other function of the recipe has; a bound method is a new object each time."""
        name, number = name if name.isidentifier() else "function", 1
        while (word := name if number == 1 else f"{name}_{number}") in self.here and self.here[word] != function:
            number += 1
        self.here[word] = function
        return word
