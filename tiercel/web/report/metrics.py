"""The finite numbers of metrics.jsonl as columns: a fifth of the memory of rows, and a metric is read at once."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

from tiercel.runs.records import finite
from tiercel.web.report.numbers import Point

_ROWS_AT_ONCE = 1000
Row = dict[str, Any]  # its step, an int, and numbers


class _Column(NamedTuple):
    """The numbers of a key, each with the number of the row that has it."""

    values: array
    places: array

    def add(self, place: int, value: float) -> None:
        self.values.append(value)
        self.places.append(place)  # last: another thread reads up to here


class Metrics(Sequence[Mapping[str, Any]]):
    """Rows by step, each step once: as they were when this was made. Each row is put together when it is asked for."""

    def __init__(self, steps: list[int], columns: Mapping[str, _Column], order: Sequence[int], unreadable: int) -> None:
        """`order`: the places of the rows among those that were read."""
        self._steps, self._columns, self._order = steps, columns, order
        self.unreadable = unreadable  # lines

    @classmethod
    def of_numbers(cls, steps: list[int], numbers: Mapping[str, Mapping[int, float]]) -> "Metrics":
        """Make rows of numbers by place, under each key. `steps`: of the rows, in their order."""
        columns = {key: _Column(array("d", found.values()), array("I", found)) for key, found in numbers.items()}
        return cls(steps, columns, range(len(steps)), 0)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._rows(self._order[index]) if isinstance(index, slice) else self._rows([self._order[index]])[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.unreadable == other.unreadable and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.since(0)

    def since(self, start: int) -> Iterator[Mapping[str, Any]]:
        """Yield the rows from the one of this number on."""
        for first in range(start, len(self), _ROWS_AT_ONCE):
            yield from self._rows(self._order[first : first + _ROWS_AT_ONCE])

    def _rows(self, places: Sequence[int]) -> list[Row]:
        rows = {place: {"step": self._steps[place]} for place in places}
        for key, (values, known) in list(self._columns.items()) if rows else ():
            at, end = bisect_left(known, min(places)), max(places)
            while at < len(known) and known[at] <= end:
                if (row := rows.get(known[at])) is not None:
                    row[key] = values[at]
                at += 1
        return list(rows.values())

    def names(self) -> list[str]:
        """Return every key, in order of first appearance."""
        return list(self._columns)

    def series(self, key: str) -> list[Point]:
        """Return (step, value) for each row that has a finite number under `key`."""
        return [(self._steps[place], value) for place, value in self._numbers(key)]

    def having(self, key: str) -> list[Row]:
        """Return the rows that have a finite number under `key`."""
        return [self._rows([place])[0] for place, _ in self._numbers(key)]

    def of_step(self, step: int) -> Row:
        """Return the row of a step that is there."""
        return self._rows([self._order[bisect_left(self._order, step, key=self._steps.__getitem__)]])[0]

    def _numbers(self, key: str) -> list[tuple[int, float]]:
        """Return (place, value) of the numbers under a key, in the order of the steps."""
        if (column := self._columns.get(key)) is None:
            return []
        known = zip(column.places, column.values, strict=False)
        if isinstance(self._order, range):
            return [(place, value) for place, value in known if place < len(self._order)]
        values = dict(known)
        return [(place, values[place]) for place in self._order if place in values]


class GrowingMetrics:
    """Rows that are added as they are read."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._columns: dict[str, _Column] = {}
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
            if (column := self._columns.get(key)) is None:
                column = self._columns[key] = _Column(array("d"), array("I"))
            if number is not None and key != "step":
                column.add(place, number)
        self._is_ordered = self._is_ordered and (place == 0 or step > self._steps[-1])
        self._steps.append(step)

    def now(self) -> Metrics:
        """Return the rows so far; of a step that is there twice the last one. What is added later does not change
        them."""
        order: Sequence[int] = range(len(self._steps))
        if not self._is_ordered:
            last = {step: place for place, step in enumerate(self._steps)}
            order = [last[step] for step in sorted(last)]
        return Metrics(self._steps, self._columns, order, self._unreadable)
