"""Where the cells run, and what a result is valid for."""

import gc
import hashlib
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import versions
from tiercel.devices import training_device
from tiercel.planning.devices import DEVICES, Device, known_device

ROOT = Path(__file__).parents[2]
SOURCES = ("tiercel", "benchmarks", "examples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The device of the measurements. `card` has its peaks, or is None if they are unknown."""

    device: torch.device
    dtype: torch.dtype
    card: Device | None
    is_toy: bool
    repetitions: int = 3  # counted ones, after one that does not count

    @property
    def name(self) -> str:
        """Return the card's name."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    @property
    def peak_bytes(self) -> int | None:
        """Return the most memory since `free`, or None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def share_of_flops(self, operations: float, seconds: float) -> float | None:
        """Return the MFU, or None if the card's peak is unknown."""
        return None if self.card is None else operations / seconds / self.card.flops

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Release memory, and start counting its peak again."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self.finish()

    def is_alive(self) -> bool:
        """Return whether the device still answers after a failure, because some CUDA errors end it for the whole
        process."""
        try:
            torch.zeros(1, device=self.device)
            self.finish()
        except RuntimeError:
            return False
        return True


class Clock:
    """Measures the seconds of what ran inside `running`, including the device's work."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self.seconds: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        self.setup.finish()
        started = time.perf_counter()
        yield
        self.setup.finish()
        self.seconds.append(time.perf_counter() - started)


def on_a_card() -> Setup:
    """Return the first CUDA GPU in bfloat16. Raises SystemExit if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here, so there is nothing to measure; --toy runs every part on a CPU")
    card = known_device(torch.cuda.get_device_name())
    return Setup(device=training_device(), dtype=torch.bfloat16, card=card, is_toy=False)


def on_a_cpu() -> Setup:
    """Return toy shapes in float32, with made-up peaks, so that every field has a value."""
    card = replace(DEVICES["h100"], name="made up", flops=1e12, bandwidth=1e10)
    return Setup(device=torch.device("cpu"), dtype=torch.float32, card=card, is_toy=True, repetitions=1)


def stamp(setup: Setup) -> dict[str, Any]:
    """Return what a result is valid for, and where it came from."""
    return {
        "card": setup.name,
        "commit": source_state(),
        "peaks": None if setup.card is None else asdict(setup.card),
        "versions": versions(),
    }


def source_state() -> str:
    """Return the commit, with `+` and a hash if files differ from it, or only the hash without git."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")):
        digest.update(file.read_bytes())
    tree = digest.hexdigest()[:12]
    commit, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--", *SOURCES)
    if commit is None:
        return f"sources {tree}"
    python_changed = any(line.endswith(".py") for line in (changes or "").splitlines())
    return f"{commit}+{tree}" if python_changed else commit


def _git(*arguments: str) -> str | None:
    try:
        found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None
