"""Pictures that the trajectories of a group share: made once, kept while there is room."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Kept(Generic[Thing]):
    """Keeps what was asked for last, up to a number of bytes. Threads that ask for the same at a time wait for the one
    that makes it. The newest is kept whatever its size."""

    def __init__(self, limit_bytes: int, size_of: Callable[[Thing], int]):
        self._limit, self._size_of = limit_bytes, size_of
        self._lock = Lock()
        self._things: OrderedDict[Hashable, Future[Thing]] = OrderedDict()  # least recently used first
        self._sizes: dict[Hashable, int] = {}  # bytes, of those that are made

    def get(self, key: Hashable, make: Callable[[], Thing]) -> Thing:
        """Return what is kept for `key`, or make it. Raises what `make` does; then nothing is kept."""
        with self._lock:
            if is_new := key not in self._things:
                self._things[key] = Future()
            self._things.move_to_end(key)
            thing = self._things[key]
        if is_new:
            self._make(key, thing, make)
        return thing.result()

    def _make(self, key: Hashable, thing: "Future[Thing]", make: Callable[[], Thing]) -> None:
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                del self._things[key]
            thing.set_exception(error)
            return
        thing.set_result(made)
        with self._lock:
            self._sizes[key] = self._size_of(made)
            for oldest in [each for each in self._things if each in self._sizes and each != key]:
                if sum(self._sizes.values()) <= self._limit:
                    break
                del self._things[oldest], self._sizes[oldest]
