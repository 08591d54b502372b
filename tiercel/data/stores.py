"""Rows as a sequence, wherever they are held: in memory, or in a file that is read when a row is asked for.

A store has the rows of one source. A `RowView` has rows of one or more stores, in an order of its own. What a run must
know of every row before its turn stands in columns of numbers (COLUMNS), so that no row has to be held for it.
"""

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, compress
from pathlib import Path
from typing import overload

import numpy as np

from tiercel.errors import DataError
from tiercel.types import ImageSource, RejectedRow, Row, VideoSource

# Name, type and value of each column. Rows that begin alike are equal in `beginning`; lines are counted from 1.
COLUMNS: dict[str, tuple[str, Callable[[Row], int]]] = {
    "id": ("<u8", lambda row: hash_of(row.id)),
    "beginning": ("<u8", lambda row: hash_of(_beginning(row))),
    "said": ("<u8", lambda row: hash_of(_said(row))),
    "line": ("<u4", lambda row: row.line),
    "images": ("<u2", lambda row: len(row.images)),
    "videos": ("<u2", lambda row: len(row.videos)),
}


class UnusableRow(DataError):
    """Raised if a row could be used when its file was read first, but cannot be used now."""

    def __init__(self, rejected: RejectedRow):
        self.rejected = rejected
        place = f"{rejected.file}:{rejected.line} ({rejected.id})"
        super().__init__(f"{place} {rejected.field}: {rejected.reason}", field=rejected.field)

    def __reduce__(self) -> tuple[type["UnusableRow"], tuple[RejectedRow]]:
        return UnusableRow, (self.rejected,)


def facts_of(row: Row, without: Collection[str] = ()) -> tuple[int, ...]:
    """Return the values of a row in COLUMNS, with 0 in those that are left out."""
    return tuple(0 if name in without else value_of(row) for name, (_, value_of) in COLUMNS.items())


def hash_of(value: object) -> int:
    """Hash text, or a tuple of plain values, to 64 bits; equal in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _beginning(row: Row) -> object:
    """Return a key that is equal for rows that begin alike: the system turn and the pictures. A row without pictures
    has its own key, because all of them together would form one block of the order."""
    if not (row.images or row.videos):
        return row.id
    system = row.messages[0].content if row.messages[0].role == "system" else None
    pixels = None if row.pixels is None else (row.pixels.least, row.pixels.most)
    roots = (row.image_roots.base, row.image_roots.more)
    return system, [_visual(each) for each in row.visuals], roots, pixels


def _visual(source: ImageSource | VideoSource) -> object:
    if isinstance(source, VideoSource):
        return source.path, [_visual(frame) for frame in source.frames], source.fps
    return source.path if source.data is None else (source.path, hashlib.sha256(source.data).hexdigest())


class RowStore(ABC):
    """Holds the usable rows of one file, directory or data set, in its order."""

    file: str
    key: str | None = None  # names the rows and how they were read, if they are kept beyond this process
    cache: Path | None = None  # the folder of what is kept

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def look(self, number: int) -> Row | RejectedRow:
        """Return a row, or why it cannot be used any more."""

    @abstractmethod
    def column(self, name: str) -> np.ndarray:
        """Return a column of COLUMNS, (rows,)."""

    @abstractmethod
    def ids(self) -> Iterator[str]:
        """Yield the ids of all rows."""


class MemoryStore(RowStore):
    """Holds rows in memory."""

    def __init__(self, file: str, rows: Sequence[Row]):
        self.file, self._rows = file, rows

    def __len__(self) -> int:
        return len(self._rows)

    def look(self, number: int) -> Row:
        return self._rows[number]

    def column(self, name: str) -> np.ndarray:
        dtype, value_of = COLUMNS[name]
        return np.fromiter(map(value_of, self._rows), dtype, len(self._rows))

    def ids(self) -> Iterator[str]:
        return (row.id for row in self._rows)


class RowView(Sequence[Row]):
    """Shows rows of stores in an order. A row is read when it is asked for; one that cannot be used any more raises
    UnusableRow."""

    def __init__(self, stores: Sequence[RowStore], places: np.ndarray | None = None):
        self.stores = tuple(stores)
        self._ends = list(accumulate(map(len, self.stores)))
        self._places = places  # among the rows of all stores, end to end; None: all of them

    def __len__(self) -> int:
        if self._places is not None:
            return len(self._places)
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, number: int) -> Row: ...

    @overload
    def __getitem__(self, number: slice) -> "RowView": ...

    def __getitem__(self, number: int | slice) -> "Row | RowView":
        if isinstance(number, slice):
            return self.subset(np.arange(*number.indices(len(self))))
        found = self.look(number)
        if isinstance(found, RejectedRow):
            raise UnusableRow(found)
        return found

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def look(self, number: int) -> Row | RejectedRow:
        """Return the row at a place, or why it cannot be used any more."""
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        place = number % len(self)
        if self._places is not None:
            place = int(self._places[place])
        if len(self.stores) == 1:
            return self.stores[0].look(place)
        store = int(np.searchsorted(self._ends, place, side="right"))
        return self.stores[store].look(place - self._ends[store] + len(self.stores[store]))

    @property
    def is_whole(self) -> bool:
        """Return whether these are all rows of the stores."""
        return self._places is None

    @property
    def places(self) -> np.ndarray:
        """Return where the rows are among those of all stores, int64 (rows,)."""
        return np.arange(len(self)) if self._places is None else self._places.astype(np.int64)

    def subset(self, numbers: np.ndarray) -> "RowView":
        """Return the rows with these numbers, in their order."""
        places = numbers if self._places is None else self._places[numbers]
        return RowView(self.stores, places.astype(np.uint32 if len(self) < 1 << 32 else np.uint64))

    def column(self, name: str) -> np.ndarray:
        """Return a column of COLUMNS, (rows,)."""
        return self._chosen([store.column(name) for store in self.stores], COLUMNS[name][0])

    @property
    def key(self) -> str | None:
        """Return a name of the rows if all of them are kept beyond this process."""
        keys = [store.key for store in self.stores if store.key is not None]
        if len(keys) < len(self.stores):
            return None
        places = b"" if self._places is None else self._places.astype("<u8").tobytes()
        return hashlib.sha256("\n".join(keys).encode() + b"\n" + places).hexdigest()

    @property
    def file_names(self) -> list[str]:
        """Return the names of the stores' files, sorted."""
        return sorted({store.file for store in self.stores})

    @property
    def files(self) -> np.ndarray:
        """Return for each row the place of its file in `file_names`, (rows,)."""
        names = self.file_names
        parts = [np.full(len(store), names.index(store.file), np.uint16) for store in self.stores]
        return self._chosen(parts, "<u2")

    def ids(self) -> Iterator[str]:
        """Yield the ids of the rows."""
        if self._places is None:
            for store in self.stores:
                yield from store.ids()
            return
        every, places = RowView(self.stores).ids(), self._places
        if np.all(places[1:] > places[:-1]):
            is_mine = np.zeros(sum(map(len, self.stores)), dtype=bool)
            is_mine[places] = True
            yield from compress(every, is_mine)
        else:
            known = list(every)
            yield from (known[place] for place in places)

    def _chosen(self, parts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
        whole = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])
        return whole if self._places is None else whole[self._places]


def view_of(rows: Sequence[Row]) -> RowView:
    """Return rows as a view; a list of them is held in memory."""
    return rows if isinstance(rows, RowView) else RowView([MemoryStore("", rows)])


def joined(views: Sequence[RowView]) -> RowView:
    """Put views end to end."""
    stores = [store for view in views for store in view.stores]
    if all(view.is_whole for view in views):
        return RowView(stores)
    starts = accumulate((sum(map(len, view.stores)) for view in views), initial=0)
    return RowView(stores).subset(
        np.concatenate([view.places + start for view, start in zip(views, starts, strict=False)])
    )


def repeated_ids(rows: RowView) -> dict[int, int]:
    """Return the rows whose id an earlier row has, each with the first such row."""
    return same_ids(rows.column("id"), lambda number: rows[number].id)


def same_ids(hashes: np.ndarray, id_of: Callable[[int], str]) -> dict[int, int]:
    """Return the numbers of rows whose id an earlier row has, in order, each with that of the first such row. `hashes`
    are those of the ids, (rows,); `id_of` is asked only about rows of equal hashes."""
    ordered = np.sort(hashes)
    if not np.any(ordered[1:] == ordered[:-1]):  # as a rule; the rest needs five times the memory
        return {}
    _, firsts, of_row = np.unique(hashes, return_index=True, return_inverse=True)
    firsts = firsts[of_row.reshape(-1)]
    found = np.flatnonzero(firsts != np.arange(len(firsts))).tolist()
    return {number: int(firsts[number]) for number in found if id_of(number) == id_of(int(firsts[number]))}


def _said(row: Row) -> object:
    """Return what a row says; of its pictures, only the names count."""
    texts = [[message.content for message in side.messages] for side in row.sides]
    pictures = [*(image.path for image in row.images), *(video.path for video in row.videos)]
    return texts, pictures, row.answer, row.label, list(row.columns.items())
