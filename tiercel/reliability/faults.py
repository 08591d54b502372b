"""The one place where planned faults enter. It is empty in production; `make faults` and tests fill it."""

from typing import TypeVar

T = TypeVar("T")


class Faults:
    """Faults by site: a phase of a step, or a name that a call below gives. Here none is planned."""

    def maybe_fail(self, site: str, step: int, rank: int) -> bool:
        """Perform the fault that is planned for this moment. True where the caller must skip its next action."""
        return False

    def maybe_corrupt(self, value: T, site: str, step: int, rank: int) -> T:
        """Return the value, a number or a tensor, or what is planned for it."""
        return value


_faults = Faults()


def faults() -> Faults:
    """Return the faults of this process."""
    return _faults


def put(new: Faults) -> Faults:
    """Replace the faults of this process, and return the earlier ones."""
    global _faults
    before, _faults = _faults, new
    return before
