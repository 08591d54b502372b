"""Files of a run as they are, without secrets: texts, lines of JSON, and files that grow."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tiercel.regular_files import LARGEST_FILE, open_regular, read_text
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.json_lines import blocks_of_lines, parsed
from tiercel.web.report.metrics import GrowingMetrics

_LOG_BYTES = 1 << 16  # of the end of log.txt
_SHORT_YAML = 8192  # characters; a recipe with every key has 5,000
_MOST_BRACKETS = 10_000  # a recipe has dozens
T = TypeVar("T")
Sign = tuple[int, int, int]  # inode, size, time of the last change


def sign_of(path: Path) -> Sign | None:
    """Return what changes when a file or the names in a folder change; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def text_of(file: Path, largest: int = LARGEST_FILE) -> str:
    """Read a file without secrets; an empty text if there is none. Raises OSError if it cannot be read."""
    return redact(read_text(file, largest)) if os.path.lexists(file) else ""


def end_of_log(file: Path) -> tuple[str, ...]:
    """Return the last lines of log.txt. Raises OSError if it cannot be read."""
    if not os.path.lexists(file):
        return ()
    with open_regular(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _LOG_BYTES))
        text = stream.read(_LOG_BYTES).decode("utf-8", errors="replace")
    return tuple(redact(text).splitlines()[1 if size > _LOG_BYTES else 0 :])


class Tail:
    """The lines of a file that grows, in `values`: None for one that is no JSON. A file that was replaced or became
    shorter is read again from its start."""

    def __init__(self, file: Path, is_over: bool) -> None:
        """`is_over`: nobody writes the file, so a last line without a newline counts as well."""
        self.file = file
        self._is_over = is_over
        self._inode, self._read = -1, 0
        self.drop()

    def refresh(self) -> bool:
        """Read what is new. Returns whether the lines that were there before were dropped. Raises OSError."""
        inode, size, _ = sign_of(self.file) or (0, 0, 0)
        is_new = inode != self._inode or size < self._read
        if is_new:
            self.drop()
            self._inode, self._read = -1, 0
        if (is_new and os.path.lexists(self.file)) or size > self._read:
            with open_regular(self.file, LARGEST_FILE) as file:
                file.seek(self._read)
                for block in blocks_of_lines(file, size):
                    if self._is_over or block.endswith(b"\n"):
                        self._read += len(block)
                        self.add(parsed_lines(block.decode("utf-8", errors="replace")))
        self._inode = inode
        return is_new

    def drop(self) -> None:
        """Forget all lines."""
        self.values: list[Any] = []

    def add(self, values: list[Any]) -> None:
        """Take the values of new lines."""
        self.values += values


class MetricsTail(Tail):
    """The rows of metrics.jsonl, in `rows`."""

    def drop(self) -> None:
        self.rows = GrowingMetrics()

    def add(self, values: list[Any]) -> None:
        for value in values:
            self.rows.add(value)


def mapping_of(parse: Callable[[str], Any], text: str) -> dict[str, Any] | None:
    """Parse a text; None if it is not a mapping."""
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def yaml_value(text: str) -> Any:
    """Parse what `render` wrote, by libyaml if PyYAML was built with it: ten times faster. libyaml's stack overflows
    on brackets by the ten thousand, so a longer text is left to PyYAML's own parser, which raises RecursionError."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS:  # which would take seconds
        raise RecursionError
    is_short = len(text) <= _SHORT_YAML
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text) if is_short else yaml.SafeLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parsed_lines(text: str) -> list[Any]:
    """Return the values of lines of JSON without secrets; None for a line that cannot be read."""
    is_clean = redact(text) == text
    lines = [line for line in text.split("\n") if line.strip()]
    if is_clean:
        with suppress(ValueError, RecursionError):
            values: list[Any] = json.loads(f"[{','.join(lines)}]")  # all values share their keys: half the memory
            if len(values) == len(lines):
                return values
    return [
        value if is_clean or redact(line) == line else redact_values(value)
        for line, value in zip(lines, map(parsed, lines), strict=True)
    ]


def parsed_records(text: str, read: Callable[[Any], T]) -> tuple[list[T], int]:
    """Read a record of each line without secrets; return them, and how many lines are none. `read` raises ValueError if
    a value is no record."""
    records: list[T] = []
    unreadable = 0
    for value in parsed_lines(text):
        try:
            records.append(read(value))
        except ValueError:
            unreadable += 1
    return records, unreadable
