"""What a plan is made for: ranks, their devices' memory, and that of the machine they are in."""

import os
from dataclasses import dataclass

from tiercel.planning.memory import RankMemory
from tiercel.planning.seconds import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The ranks of a plan."""

    ranks: int
    memory_bytes: int  # of each
    device: Device | None  # None: a CPU, of which no seconds are foretold
    host_bytes: int | None = None  # of one machine's own memory, where that is known

    @property
    def is_gpu(self) -> bool:
        return self.device is not None

    @property
    def ranks_together(self) -> int:
        """Ranks of one machine."""
        return self.ranks if self.device is None else min(self.ranks, self.device.per_machine)

    def holds(self, memory: RankMemory) -> bool:
        """Whether a rank's bytes fit into its device, and those of a machine's ranks into the machine."""
        has_room = self.host_bytes is None or memory.host_bytes * self.ranks_together <= self.host_bytes
        return has_room and memory.fits(self.memory_bytes)


def memory_here() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
