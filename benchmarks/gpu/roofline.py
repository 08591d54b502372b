"""A time model: the seconds of a step by phase, estimated from the log of a null GPU and the data sheet of a card.

    .venv-gpu/bin/python -m tests.nullgpu.step 7b FILE            the log of a whole step, on a null card
    .venv/bin/python -m benchmarks.gpu.roofline FILE [--card h100]

Nothing here was measured on a card. Matrix products are counted by their sizes, kernels that Inductor fused by the
bytes of their tensors, and others by their threads. Of attention the log tells at most what it reads and writes, so
long rows take longer than estimated.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.planning.devices import DEVICES, Device

FLOPS_SHARE, BANDWIDTH_SHARE = 0.65, 0.8  # of large products, and of large copies; assumed
SHORTEST_KERNEL, SHORTEST_PRODUCT, HOST_COPY = 1.8e-6, 3e-6, 3e-6  # seconds, in a graph or a full queue; assumed
TILE = 128  # rows and columns of a product that one multiprocessor computes at a time
MULTIPROCESSORS = 132
DEEP = 8192  # a product with a longer sum is split over all multiprocessors
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8}
FLOAT32_SHARE = 1 / 16  # of the peak in bfloat16, without tensor cores
NUMBERS_OF_A_THREAD = 4
OTHERS = "other kernels"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the log: tests/nullgpu/log.py says what the numbers are."""

    kind: str
    numbers: Sequence[int]
    name: str


def estimated(calls: Iterable[Call], card: Device) -> dict[str, float]:
    """Add up the seconds by kind of work. Replays of a graph count all that it has."""
    seconds: dict[str, float] = defaultdict(float)
    for call in expanded(calls):
        if call.kind == "gemm":
            seconds["products"] += product_seconds(call, card)
        elif call.kind == "launch":
            seconds[kind_of(call.name)] += kernel_seconds(call, card)
        elif call.kind in {"copy", "set"}:
            seconds["copies"] += copy_seconds(call, card)
    return dict(seconds)


def expanded(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls, those of a graph each time that it is launched, and not while it is captured."""
    graphs: dict[int, list[Call]] = {}
    captured: list[Call] | None = None
    for call in calls:
        if call.kind == "graph" and call.name == "begin":
            captured = graphs[call.numbers[0]] = []
        elif call.kind == "graph" and call.name == "end":
            captured = None
        elif call.kind == "graph":
            yield from graphs.get(call.numbers[0], ())
        elif captured is not None:
            captured.append(call)
        else:
            yield call


def product_seconds(call: Call, card: Device) -> float:
    """Return the longer of the time to compute and the time to read and write. Few tiles leave multiprocessors idle,
    but a long sum is split among them."""
    rows, columns, depth, batch = (max(1, number) for number in call.numbers)
    kinds = re.search(r"(bf16|f16|f32|f64)(?:->(bf16|f16|f32))?", call.name)
    source, target = (kinds[1], kinds[2] or kinds[1]) if kinds else ("f32", "f32")
    peak = card.flops * (1.0 if source in {"bf16", "f16"} else FLOAT32_SHARE)
    tiles = -(-rows // TILE) * -(-columns // TILE) * batch
    busy = min(1.0, tiles / MULTIPROCESSORS) if depth < DEEP else 1.0
    computing = 2 * rows * columns * depth * batch / (peak * FLOPS_SHARE * max(busy, 0.25))
    moved = batch * (WIDTHS[source] * (rows + columns) * depth + WIDTHS[target] * rows * columns)
    return max(computing, moved / (card.bandwidth * BANDWIDTH_SHARE), SHORTEST_PRODUCT)


def kernel_seconds(call: Call, card: Device) -> float:
    """Return the time to read and write the bytes of its tensors. If the log does not have them, these are two tensors
    and one, with the numbers that the kernel's threads take, or nothing for attention."""
    blocks, threads, _, _, *touched = call.numbers
    if touched or kind_of(call.name) != OTHERS:
        return max(sum(touched) / (card.bandwidth * BANDWIDTH_SHARE), SHORTEST_KERNEL)
    vector = re.search(r"vectorized_elementwise_kernelILi(\d+)|\d+elementwise_kernelILi\d+ELi(\d+)", call.name)
    numbers = blocks * threads * (int(vector[1] or vector[2]) if vector else NUMBERS_OF_A_THREAD)
    width = 2 if "BFloat16" in call.name or "Half" in call.name else 4
    return max(3 * width * numbers / (card.bandwidth * BANDWIDTH_SHARE), SHORTEST_KERNEL)


def copy_seconds(call: Call, card: Device) -> float:
    """Return the time of a copy on the card, which reads and writes, or of a small one from the host."""
    if call.name in {"d2d", "memset"}:
        return max(2 * call.numbers[0] / (card.bandwidth * BANDWIDTH_SHARE), SHORTEST_KERNEL)
    return max(call.numbers[0] / card.host_link, HOST_COPY)


def kind_of(name: str) -> str:
    """Return the kind of work of a kernel."""
    if "flash" in name or "flex_attention" in name or "fmha" in name:
        return "attention, bytes only"
    return "fused kernels" if name.startswith("triton") else OTHERS


def read_phases(file: Path) -> dict[str, list[Call]]:
    """Read a file of tests/nullgpu/step.py: the calls of each phase."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return {phase: [Call(*each) for each in calls] for phase, calls in content["phases"].items()}


def report(phases: Mapping[str, Mapping[str, float]], card: Device) -> str:
    """Format the seconds by phase and kind of work."""
    lines = [f"estimated seconds of a step on {card.name}, not measured"]
    for phase, seconds in phases.items():
        parts = ", ".join(f"{kind} {value:.3f}" for kind, value in sorted(seconds.items(), key=_largest_first))
        lines.append(f"{phase}: {sum(seconds.values()):.3f} ({parts})")
    lines.append(f"step: {sum(sum(seconds.values()) for seconds in phases.values()):.3f}")
    return "\n".join(lines)


def _largest_first(item: tuple[str, float]) -> float:
    return -item[1]


def main(arguments: Sequence[str]) -> None:
    """Print the estimate."""
    parser = argparse.ArgumentParser(description="estimate the seconds of a step from the log of a null GPU")
    parser.add_argument("file", type=Path)
    parser.add_argument("--card", choices=DEVICES, default="h100")
    asked: Any = parser.parse_args(arguments)
    card = DEVICES[asked.card]
    print(report({phase: estimated(calls, card) for phase, calls in read_phases(asked.file).items()}, card))


if __name__ == "__main__":
    main(sys.argv[1:])
