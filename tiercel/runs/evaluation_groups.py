"""The scored groups of an evaluation. With a file, an interrupted evaluation resumes after the last batch written."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiercel.log import logger
from tiercel.regular_files import lines_of, open_new, open_to_append, read_json, remove
from tiercel.runs.files import json_line, write_atomically
from tiercel.runs.records import GroupRecord
from tiercel.writing import writing


class EvaluationSink:
    """Takes groups and keeps none. The first rank calls it."""

    def begin(self, rows: Callable[[], Any]) -> tuple[int, int]:
        """Return how many batches are there already, and how many of their rows were rejected. `rows` describes the
        held-out rows."""
        return 0, 0

    def read(self) -> Iterator[GroupRecord]:
        """Yield the groups that are there already."""
        return iter(())

    def add(self, groups: Sequence[GroupRecord], batches: int, rejected: int) -> None:
        """Take the groups of one more batch; `batches` and `rejected` count all so far."""


class EvaluationsInMemory(EvaluationSink):
    """Keeps groups in memory."""

    def __init__(self) -> None:
        self.every: list[GroupRecord] = []

    def add(self, groups: Sequence[GroupRecord], batches: int, rejected: int) -> None:
        self.every += groups


class EvaluationsFile(EvaluationSink):
    """Writes groups to FILE.NUMBER.part and the progress to FILE.NUMBER.state, until `finish`. Files that an evaluation
    with another `key` or of other rows has left are written again."""

    def __init__(self, file: Path, number: int, key: object):
        self._file, self._key = file, key
        self._part, self._state = (file.with_name(f"{file.name}.{number}.{end}") for end in ("part", "state"))

    def begin(self, rows: Callable[[], Any]) -> tuple[int, int]:
        self._key = sha256(json.dumps([self._key, rows()]).encode()).hexdigest()
        with writing(self._part):
            try:
                state = read_json(self._state)
                size, batches, rejected = (int(state[name]) for name in ("bytes", "batches", "rejected"))
                if state["key"] == self._key and self._part.stat().st_size >= size:
                    os.truncate(self._part, size)  # what was written of a further batch
                    logger.info(f"{self._part}: resuming after batch {batches:,}")
                    return batches, rejected
                logger.warning(f"{self._part}: belongs to another evaluation and is overwritten")
            except (FileNotFoundError, ValueError, LookupError, TypeError):
                pass
            open_new(self._part).close()
        return 0, 0

    def read(self) -> Iterator[GroupRecord]:
        return (GroupRecord.from_json(json.loads(line)) for line in lines_of(self._part))

    def add(self, groups: Sequence[GroupRecord], batches: int, rejected: int) -> None:
        with writing(self._part):
            with open_to_append(self._part) as stream:
                stream.writelines(json_line(group.as_json()) for group in groups)
                stream.flush()
                os.fsync(stream.fileno())
            state = {"key": self._key, "bytes": self._part.stat().st_size, "batches": batches, "rejected": rejected}
            write_atomically(self._state, json.dumps(state))

    def finish(self, *, is_kept: bool) -> None:
        """Give the file its name, or remove it."""
        with writing(self._file):
            if is_kept:
                self._part.replace(self._file)
            remove(self._part)
            remove(self._state)
