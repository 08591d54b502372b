"""The machine of a plan: its ranks, the memory of their devices, and the memory of the host."""

import os
from dataclasses import dataclass

from tiercel.planning.devices import Device
from tiercel.planning.memory import RankMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The ranks of a plan."""

    ranks: int
    memory_bytes: int  # of each
    device: Device | None  # None: a CPU, for which no seconds are estimated
    host_bytes: int | None = None  # of one machine's host memory, if known

    @property
    def is_gpu(self) -> bool:
        return self.device is not None

    @property
    def ranks_together(self) -> int:
        """Return the number of ranks on one machine."""
        return self.ranks if self.device is None else min(self.ranks, self.device.per_machine)

    def holds(self, memory: RankMemory) -> bool:
        """Return whether a rank's bytes fit into its device, and those of all ranks of a machine into its host
        memory."""
        has_room = self.host_bytes is None or memory.host_bytes * self.ranks_together <= self.host_bytes
        return has_room and memory.fits(self.memory_bytes)


def memory_here() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
