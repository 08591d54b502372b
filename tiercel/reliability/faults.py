"""The one place where planned faults enter. No fault is planned in production; `make faults` and tests plan some."""

from typing import TypeVar

T = TypeVar("T")


class Faults:
    """Planned faults by site, which is a phase of a step or a name that the caller gives. This class plans none."""

    def maybe_fail(self, site: str, step: int, rank: int) -> bool:
        """Perform the fault that is planned for this moment. Returns True if the caller must skip its next action."""
        return False

    def maybe_corrupt(self, value: T, site: str, step: int, rank: int) -> T:
        """Return the value, a number or a tensor, or what a planned fault makes of it."""
        return value


_faults = Faults()


def faults() -> Faults:
    """Return the faults of this process."""
    return _faults


def put(new: Faults) -> Faults:
    """Replace the faults of this process and return the earlier ones."""
    global _faults
    before, _faults = _faults, new
    return before
