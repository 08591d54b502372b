"""The log of a whole step on a null card: `python -m tests.nullgpu.step MODEL FILE` writes the calls of the second step
by phase, for benchmarks/gpu/roofline.py. The graphs of the first step's captures come first in the rollout."""

import json
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.gpu.models import MODELS, random_policy
from benchmarks.gpu.setup import Clock, on_a_card
from benchmarks.gpu.whole_steps import STEPS, TOY_STEPS, WholeStep, one_step
from tests.nullgpu.log import Entry, Log, logged, mark
from tiercel.config.schema import Optim
from tiercel.distributed.strategies.optimizer import build_optimizer
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.engine import LocalSampler

PHASES = ("vision", "rollout", "learn", "update")
PHASE = "phase"


def step_of(model: str) -> WholeStep:
    """Return the first step of this model."""
    return next(step for step in (*STEPS.values(), *TOY_STEPS.values()) if step.model == model)


def mark_phases() -> None:
    """Mark in the log where each phase begins."""
    running = Clock.running

    def marked(self: Clock):
        mark(PHASE)
        return running(self)

    Clock.running = marked


def run(step: WholeStep) -> dict[str, list[Entry]]:
    """Run two steps, and return the calls of the second by phase."""
    setup = on_a_card()
    policy = random_policy(MODELS[step.model], setup.device, setup.dtype)
    vision = VisionStore(policy, cache_bytes=0)
    sampler, optimizer = LocalSampler(policy, vision), build_optimizer(policy, Optim())
    with logged() as log:
        for _ in range(2):
            one_step(sampler, vision, optimizer, step, setup)
    return _phases(log)


def _phases(log: Log) -> dict[str, list[Entry]]:
    starts = [number for number, entry in enumerate(log.entries) if entry.kind == "mark" and entry.name == PHASE]
    first, second = starts[: len(PHASES)], starts[len(PHASES) :]
    stops = [*second[1:], len(log.entries)]
    found = {name: log.entries[start:stop] for name, start, stop in zip(PHASES, second, stops, strict=True)}
    found["rollout"] = [*_captures(log.entries[first[1] : first[2]]), *found["rollout"]]
    return found


def _captures(entries: list[Entry]) -> list[Entry]:
    """Return what was captured, with the begin and the end of each capture."""
    kept, is_captured = [], False
    for entry in entries:
        is_edge = entry.kind == "graph" and entry.name in {"begin", "end"}
        if is_captured or is_edge:
            kept.append(entry)
        if is_edge:
            is_captured = entry.name == "begin"
    return kept


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False  # there is no null cuDNN
    made = run(step_of(sys.argv[1]))
    content = {phase: [[each.kind, each.numbers, each.name] for each in calls] for phase, calls in made.items()}
    Path(sys.argv[2]).write_text(json.dumps({"model": sys.argv[1], "phases": content}), encoding="utf-8")
