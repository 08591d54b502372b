"""The finite numbers of metrics.jsonl as columns: a fifth of the memory of rows, and a metric is read at once."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from tiercel.runs.records import finite
from tiercel.web.report.numbers import Point

Row = dict[str, Any]  # its step, an int, and numbers


class Metrics:
    """Rows by step, each step once: as they were when this was made. Each row is put together when it is asked for."""

    def __init__(self, steps: Sequence[int], columns: Mapping[str, array], unreadable: int) -> None:
        """`columns`: the number of each row, NaN if it has none; one may be shorter or longer than `steps`."""
        self._steps, self._columns = steps, columns
        self.unreadable = unreadable  # lines

    def __len__(self) -> int:
        return len(self._steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.unreadable == other.unreadable and list(self) == list(other)

    def __iter__(self) -> Iterator[Row]:
        return self.since(0)

    def since(self, start: int) -> Iterator[Row]:
        """Yield the rows from the one of this number on."""
        return map(self._row, range(start, len(self)))

    def _row(self, place: int) -> Row:
        row: Row = {"step": self._steps[place]}
        for key, column in list(self._columns.items()):
            if place < len(column) and not math.isnan(value := column[place]):
                row[key] = value
        return row

    @property
    def last_step(self) -> int:
        """Return the step of the last row; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    def names(self) -> list[str]:
        """Return every key, in order of first appearance."""
        return list(self._columns)

    def series(self, key: str) -> list[Point]:
        """Return (step, value) for each row that has a finite number under `key`."""
        known = zip(self._steps, self._columns.get(key, ()), strict=False)
        return [(step, value) for step, value in known if not math.isnan(value)]

    def having(self, key: str) -> list[Row]:
        """Return the rows that have a finite number under `key`."""
        known = zip(range(len(self)), self._columns.get(key, ()), strict=False)
        return [self._row(place) for place, value in known if not math.isnan(value)]


class GrowingMetrics:
    """Rows that are added as they are read."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._columns: defaultdict[str, array] = defaultdict(partial(array, "d"))
        self._is_ordered = True
        self._unreadable = 0

    def add(self, row: Any) -> None:
        """Add a value of a line; what is not a row with a step is counted."""
        if not isinstance(row, dict) or type(step := row.get("step")) is not int:
            self._unreadable += 1
            return
        place = len(self._steps)
        for key, value in row.items():
            number = value if type(value) is float and value - value == 0 else finite(value)
            if number is not None and key != "step":
                column = self._columns[key]
                if len(column) < place:
                    column.extend([math.nan] * (place - len(column)))
                column.append(number)
        self._is_ordered = self._is_ordered and (place == 0 or step > self._steps[-1])
        self._steps.append(step)

    def now(self) -> Metrics:
        """Return the rows so far; of a step that is there twice the last one. What is added later does not change
        them."""
        if self._is_ordered:
            return Metrics(self._steps.copy(), self._columns, self._unreadable)
        last = {step: place for place, step in enumerate(self._steps)}
        steps = sorted(last)
        columns = {
            key: array("d", (column[last[step]] if last[step] < len(column) else math.nan for step in steps))
            for key, column in self._columns.items()
        }
        return Metrics(steps, columns, self._unreadable)
