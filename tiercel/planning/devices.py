"""What GPUs can do at best, from their data sheets: for the plan's seconds, for `mfu`, and for benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
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


def _device(
    name: str,
    sold_as: str,
    capability: tuple[int, int],
    flops: float,
    bandwidth: float,
    links: tuple[float, float, float],
) -> Device:
    """Build a row of the table from TFLOP/s, TB/s, and `links` in GB/s (machine, network, host)."""
    link, network, host_link = (speed * 1e9 for speed in links)
    return Device(
        name=name,
        sold_as=sold_as,
        capability=capability,
        flops=flops * 1e12,
        bandwidth=bandwidth * 1e12,
        link=link,
        network=network,
        host_link=host_link,
    )


_TABLE = (  # `known_device` takes the first that matches, so a special model comes before the general one
    _device("b200", "B200", (10, 0), 2250, 8.0, (900, 50, 64)),
    _device("h200", "H200", (9, 0), 989, 4.8, (450, 50, 64)),
    _device("h100-nvl", "H100 NVL", (9, 0), 835, 3.9, (300, 50, 64)),
    _device("h100-pcie", "H100 PCIe", (9, 0), 756, 2.0, (300, 50, 64)),
    _device("h100", "H100", (9, 0), 989, 3.35, (450, 50, 64)),
    _device("h20", "H20", (9, 0), 148, 4.0, (450, 50, 64)),
    _device("a100-40gb-sxm", "A100-SXM4-40GB", (8, 0), 312, 1.555, (300, 25, 32)),
    _device("a100-40gb-pcie", "A100-PCIE-40GB", (8, 0), 312, 1.555, (300, 25, 32)),
    _device("a100", "A100", (8, 0), 312, 2.0, (300, 25, 32)),
    _device("l40s", "L40S", (8, 9), 362, 0.86, (32, 12.5, 32)),
    _device("rtx4090", "RTX 4090", (8, 9), 165, 1.008, (32, 12.5, 32)),
)
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}


def known_device(card: str) -> Device | None:
    """Find a card by the name that torch reports. Returns None if the table does not have it."""
    return next((device for device in DEVICES.values() if device.sold_as in card), None)
