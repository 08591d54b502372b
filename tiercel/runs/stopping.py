"""SIGTERM and SIGINT: the loop asks for them between steps, saves, and ends. A second signal ends the process."""

import signal
from types import FrameType


class StopRequest:
    """A request to stop, set by the first signal; a context manager that restores the earlier handlers at its end."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.is_set = True
