"""What the three drivers share: what is asked of them, a clock, and the one line of JSON that they answer.

Imported in every framework's environment, so it needs nothing beyond Python's own library.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import TextIO

SYSTEM = "You are a helpful assistant."
QUESTION = "Where is the red circle?"
LORA_RANK = 16
LORA_ALPHA = 32
# The linear layers of the decoder; the vision tower has layers of the same names.
LORA_TARGETS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One driver's run: a prompt with one image per step, `group_size` completions of one length, one update."""

    model: Path
    images: Path  # directory of PNG files, one for each step
    scratch: Path  # where the framework may leave files
    completion_tokens: int
    group_size: int
    warmup: int  # steps before the counted ones
    steps: int  # counted

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps

    def image_files(self) -> list[Path]:
        """The first `all_steps` images. Raises ValueError where there are fewer."""
        files = sorted(self.images.glob("*.png"))[: self.all_steps]
        if len(files) < self.all_steps:
            raise ValueError(f"--images: {len(files)} images for {self.all_steps} steps; write more")
        return files


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a driver saw; lists have one entry per counted step, times are in seconds."""

    versions: dict[str, str]
    threads: int
    trained_parameters: int
    prompt_tokens: int
    completion_tokens: list[int]  # of every completion of every counted step
    step_seconds: list[float]
    phase_seconds: dict[str, list[float]]  # what no phase covers belongs to the step alone
    gradient_norms: list[float]  # before clipping
    peak_bytes: int  # largest resident size of the process


def parse_task(description: str | None) -> Task:
    """The task from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "images", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("completion-tokens", "group-size", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = Task(**vars(parser.parse_args()))
    if task.warmup < 1 or task.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    return task


@contextmanager
def answer_stream() -> Iterator[TextIO]:
    """The real standard output; what the libraries print inside goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        sys.stdout.flush()
        os.dup2(2, 1)
        yield stream


def write_answer(stream: TextIO, measurement: Measurement) -> None:
    """One line of JSON."""
    stream.write(json.dumps(asdict(measurement)) + "\n")


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of installed distributions, without a local part such as +cpu."""
    return {name: version(name).partition("+")[0] for name in names}


def peak_bytes() -> int:
    """Largest resident size of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_rewards(step: int, count: int) -> list[float]:
    """Rewards that no completion influences, alike in every framework."""
    generator = Random(step)
    return [generator.random() for _ in range(count)]


@dataclass(kw_only=True, slots=True)
class StepClock:
    """Seconds of each step, end to end, and of phases within it. A phase stops while one inside it runs."""

    steps: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    _current: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _step_start: float = field(default_factory=time.perf_counter)
    _last: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside counts for this phase, less the phases inside it."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def end_step(self) -> None:
        """What comes after belongs to the next step."""
        now = time.perf_counter()
        self.steps.append(now - self._step_start)
        self._step_start = now
        self.phases.append(self._current)
        self._current = {}

    def _book(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._current[name] = self._current.get(name, 0.0) + now - self._last
        self._last = now

    def phase_seconds(self, skip: int) -> dict[str, list[float]]:
        """Seconds per phase of every step but the first `skip`; 0 where a step did not enter it."""
        counted = self.phases[skip:]
        names = sorted({name for phases in counted for name in phases})
        return {name: [phases.get(name, 0.0) for phases in counted] for name in names}
