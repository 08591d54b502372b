"""The common parts of the three drivers: the task, a clock, and the line of JSON that is the answer.

This is imported in every framework's environment, so it needs only Python's standard library.
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
CIRCUMSTANCES = "Answer with a box, by the picture as you see it now, of the one that is number"
LORA_RANK = 16
LORA_ALPHA = 32
# The linear layers of the decoder; the vision tower has layers with the same names.
LORA_TARGETS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
LEARNING_RATE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of one driver: questions of one image per step, `group_size` completions of one length of each, one
    update."""

    model: Path
    images: Path  # directory of PNG files, one for each step
    scratch: Path  # where the framework may write files
    completion_tokens: int
    group_size: int
    questions: int  # of each image
    warmup: int  # steps before the counted ones
    steps: int  # counted

    @property
    def all_steps(self) -> int:
        return self.warmup + self.steps

    def question_texts(self) -> list[str]:
        """Return the questions; they differ in a number at their end."""
        if self.questions == 1:
            return [QUESTION]
        return [f"{QUESTION} {CIRCUMSTANCES} {number}" for number in range(self.questions)]

    def image_files(self) -> list[Path]:
        """Return the first `all_steps` images. Raises ValueError if there are fewer."""
        files = sorted(self.images.glob("*.png"))[: self.all_steps]
        if len(files) < self.all_steps:
            raise ValueError(f"--images: {len(files)} images for {self.all_steps} steps; write more")
        return files


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a driver measured. Lists have one entry per counted step, and times are in seconds."""

    versions: dict[str, str]
    threads: int
    trained_parameters: int
    prompt_tokens: int
    completion_tokens: list[int]  # of every completion of every counted step
    step_seconds: list[float]
    phase_seconds: dict[str, list[float]]  # time outside all phases counts only for the step
    gradient_norms: list[float]  # before clipping
    peak_bytes: int  # largest resident size of the process


def parse_task(description: str | None) -> Task:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "images", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("completion-tokens", "group-size", "questions", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = Task(**vars(parser.parse_args()))
    if task.warmup < 1 or task.steps < 1:
        parser.error("--warmup and --steps must be at least 1")
    return task


@contextmanager
def answer_stream() -> Iterator[TextIO]:
    """Yield the real standard output. What libraries print inside goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        sys.stdout.flush()
        os.dup2(2, 1)
        yield stream


def write_answer(stream: TextIO, measurement: Measurement) -> None:
    """Write the measurement as one line of JSON."""
    stream.write(json.dumps(asdict(measurement)) + "\n")


def installed(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of installed distributions, without a local part such as +cpu."""
    return {name: version(name).partition("+")[0] for name in names}


def peak_bytes() -> int:
    """Return the largest resident size of this process so far (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_rewards(step: int, count: int) -> list[float]:
    """Return rewards that do not depend on the completions and are the same in every framework."""
    generator = Random(step)
    return [generator.random() for _ in range(count)]


@dataclass(kw_only=True, slots=True)
class StepClock:
    """Measures the seconds of each step, end to end, and of phases within it. A phase pauses while a phase inside it
    runs."""

    steps: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    _current: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _step_start: float = field(default_factory=time.perf_counter)
    _last: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs inside for this phase, except for phases inside it."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def end_step(self) -> None:
        """End the step. What comes after belongs to the next one."""
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
        """Return the seconds per phase for every step but the first `skip`, with 0 for a step without that phase."""
        counted = self.phases[skip:]
        names = sorted({name for phases in counted for name in phases})
        return {name: [phases.get(name, 0.0) for phases in counted] for name in names}
