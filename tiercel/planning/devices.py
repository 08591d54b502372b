"""What GPUs can do at best, from their data sheets: for the plan's seconds, for `mfu`, and for benchmarks. And the
machine of a plan: its ranks, the memory of their devices, and the memory of the host."""

from dataclasses import dataclass

from tiercel.tables import table_rows


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of a data sheet, and the share of each that is assumed to be reached."""

    name: str
    sold_as: str  # a part of the name that torch reports for such a card
    capability: tuple[int, int]
    flops: float  # per second, bfloat16, dense
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to GPUs of the same machine
    network: float  # bytes per second and GPU, to other machines
    host_link: float  # bytes per second of a GPU, to and from the host's memory
    per_machine: int = 8
    reached_flops: float = 0.45
    reached_bandwidth: float = 0.6
    reached_link: float = 0.7


_UNITS = (1e12, 1e12, 1e9, 1e9, 1e9)  # of the table's figures


def _device(name: str, sold_as: str, capability: str, *figures: str) -> Device:
    major, minor = map(int, capability.split("."))
    scaled = (float(each) * unit for each, unit in zip(figures, _UNITS, strict=True))
    flops, bandwidth, link, network, host_link = scaled
    return Device(name, sold_as, (major, minor), flops, bandwidth, link, network, host_link)


DEVICES = {row[0]: _device(*row) for row in table_rows("tiercel.planning", "devices.txt")}


def known_device(card: str) -> Device | None:
    """Find a card by the name that torch reports. Returns None if the table does not have it."""
    return next((device for device in DEVICES.values() if device.sold_as in card), None)


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
