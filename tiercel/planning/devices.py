"""What GPUs can do at best, from their data sheets: for the plan's seconds, for `mfu`, and for benchmarks. And the
machine of a plan: its ranks, the memory of their devices, and the memory of the host."""

from dataclasses import dataclass


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


_TABLE = (  # TFLOP/s, TB/s, and GB/s of the links; `known_device` takes the first, so a special model comes before
    ("b200", "B200", (10, 0), 2250, 8.0, 900, 50, 64),
    ("h200", "H200", (9, 0), 989, 4.8, 450, 50, 64),
    ("h100-nvl", "H100 NVL", (9, 0), 835, 3.9, 300, 50, 64),
    ("h100-pcie", "H100 PCIe", (9, 0), 756, 2.0, 300, 50, 64),
    ("h100", "H100", (9, 0), 989, 3.35, 450, 50, 64),
    ("h20", "H20", (9, 0), 148, 4.0, 450, 50, 64),
    ("a100-40gb-sxm", "A100-SXM4-40GB", (8, 0), 312, 1.555, 300, 25, 32),
    ("a100-40gb-pcie", "A100-PCIE-40GB", (8, 0), 312, 1.555, 300, 25, 32),
    ("a100", "A100", (8, 0), 312, 2.0, 300, 25, 32),
    ("l40s", "L40S", (8, 9), 362, 0.86, 32, 12.5, 32),
    ("rtx4090", "RTX 4090", (8, 9), 165, 1.008, 32, 12.5, 32),
)
DEVICES: dict[str, Device] = {
    name: Device(name, sold_as, capability, flops * 1e12, bandwidth * 1e12, link * 1e9, network * 1e9, host_link * 1e9)
    for name, sold_as, capability, flops, bandwidth, link, network, host_link in _TABLE
}


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
