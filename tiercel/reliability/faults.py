"""The one place where faults on purpose come in. It is empty: `make faults` and tests fill it (benchmarks/faults)."""

from typing import Protocol, TypeVar

T = TypeVar("T")


class Faults(Protocol):
    """Faults by site: a phase of a step, or a name that a call below gives."""

    def strike(self, site: str, step: int, rank: int) -> bool:
        """Do what is planned for this moment. True where the caller is to leave out what it was about to do."""

    def spoil(self, value: T, site: str, step: int, rank: int) -> T:
        """Return the value, a number or a tensor, or what is planned for it."""


class NoFaults:
    """Nothing goes wrong on purpose."""

    def strike(self, site: str, step: int, rank: int) -> bool:
        return False

    def spoil(self, value: T, site: str, step: int, rank: int) -> T:
        return value


_faults: Faults = NoFaults()


def faults() -> Faults:
    """Give the faults of this process."""
    return _faults


def put(new: Faults) -> Faults:
    """Put faults in place of those of this process, which are returned."""
    global _faults
    before, _faults = _faults, new
    return before
