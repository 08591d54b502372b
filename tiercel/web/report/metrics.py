"""The rows of metrics.jsonl as columns of numbers: a fifth of the memory of rows, and a metric is read at once."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from tiercel.runs.records import finite
from tiercel.web.report.numbers import Point

_FLOAT, _INT, _OTHER = range(3)  # what a value was: of the third kind is what a double does not hold
_LARGEST_INT = 1 << 53


@dataclass(slots=True)
class _Column:
    """The values of a key, each with the number of the row that has it."""

    places: array = field(default_factory=lambda: array("I"))
    values: array = field(default_factory=lambda: array("d"))
    kinds: bytearray = field(default_factory=bytearray)
    others: dict[int, Any] = field(default_factory=dict)  # by place

    def add(self, place: int, value: Any) -> None:
        is_int = type(value) is int and -_LARGEST_INT <= value <= _LARGEST_INT
        kind = _FLOAT if type(value) is float else _INT if is_int else _OTHER
        if kind == _OTHER:
            self.others[place] = value
        self.kinds.append(kind)
        self.values.append(0.0 if kind == _OTHER else value)
        self.places.append(place)  # last: another thread reads up to here

    def at(self, number: int) -> Any:
        """Return the value of this number among those of the column, as it was."""
        kind = self.kinds[number]
        if kind == _OTHER:
            return self.others[self.places[number]]
        return self.values[number] if kind == _FLOAT else int(self.values[number])

    def numbers(self) -> Iterator[tuple[int, float]]:
        """Yield the place and the value of each finite number."""
        for place, value, kind in zip(self.places, self.values, self.kinds, strict=False):
            number = value if kind != _OTHER else finite(self.others[place])
            if number is not None and number - number == 0:
                yield place, number

    def number_of(self, place: int) -> int | None:
        """Return the number of the value of a row; None where the row has none."""
        number = bisect_left(self.places, place)
        return number if number < len(self.places) and self.places[number] == place else None


def _column(numbers: Mapping[int, float], kind: int) -> _Column:
    kinds = bytearray([kind]) * len(numbers)
    return _Column(places=array("I", numbers), values=array("d", numbers.values()), kinds=kinds)


class Metrics(Sequence[Mapping[str, Any]]):
    """Rows by step, each step once: as they were when this was made. Each row is put together when it is asked for."""

    def __init__(self, steps: list[int], columns: Mapping[str, _Column], order: Sequence[int], unreadable: int) -> None:
        """`order`: the places of the rows among those that were read."""
        self._steps, self._columns, self._order = steps, columns, order
        self._is_plain = isinstance(order, range)
        self.unreadable = unreadable  # lines

    @classmethod
    def of_numbers(cls, steps: list[int], numbers: Mapping[str, Mapping[int, float]]) -> "Metrics":
        """Make rows of numbers by place, under each key. `steps`: of the rows, in their order."""
        columns = {"step": _column(dict(enumerate(map(float, steps))), _INT)}
        columns |= {key: _column(found, _FLOAT) for key, found in numbers.items()}
        return cls(steps, columns, range(len(steps)), 0)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._row(place) for place in self._order[index]]
        return self._row(self._order[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.unreadable == other.unreadable and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self.since(0)

    def since(self, start: int) -> Iterator[Mapping[str, Any]]:
        """Yield the rows from the one of this number on."""
        if not self._is_plain:
            yield from map(self._row, self._order[start:])
            return
        columns = [(key, column) for key, column in list(self._columns.items()) if len(column.places)]
        numbers = [bisect_left(column.places, start) for _, column in columns]
        for place in self._order[start:]:
            row = {}
            for at, (key, column) in enumerate(columns):
                number = numbers[at]
                if number < len(column.places) and column.places[number] == place:
                    row[key] = column.at(number)
                    numbers[at] = number + 1
            yield row

    def _row(self, place: int) -> dict[str, Any]:
        found = ((key, column, column.number_of(place)) for key, column in list(self._columns.items()))
        return {key: column.at(number) for key, column, number in found if number is not None}

    def names(self) -> list[str]:
        """Return every key, in order of first appearance."""
        return list(self._columns)

    def series(self, key: str) -> list[Point]:
        """Return (step, value) for each row that has a finite number under `key`."""
        return [(self._steps[place], value) for place, value in self._numbers(key)]

    def having(self, key: str) -> list[dict[str, Any]]:
        """Return the rows that have a finite number under `key`."""
        return [self._row(place) for place, _ in self._numbers(key)]

    def of_step(self, step: int) -> dict[str, Any]:
        """Return the row of a step that is there."""
        return self._row(self._order[bisect_left(self._order, step, key=self._steps.__getitem__)])

    def _numbers(self, key: str) -> list[tuple[int, float]]:
        """Return (place, value) of the finite numbers under a key, in the order of the steps."""
        if (column := self._columns.get(key)) is None:
            return []
        end = len(self._order) if self._is_plain else len(self._steps)
        known = [(place, value) for place, value in column.numbers() if place < end]
        if self._is_plain:
            return known
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
        """Add a value of a line; what is no row with a step is counted."""
        if not isinstance(row, dict) or type(step := row.get("step")) is not int:
            self._unreadable += 1
            return
        place = len(self._steps)
        for key, value in row.items():
            if (column := self._columns.get(key)) is None:
                column = self._columns[key] = _Column()
            column.add(place, value)
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
