"""The log of a whole step on a null card: `python -m tests.nullgpu.step MODEL FILE` writes the calls of the last step
by phase, for benchmarks/gpu/roofline.py, and prints how many launches they are. The graphs of the first step's captures
come first in the rollout."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks.gpu.models import MODELS, make_config, random_policy
from benchmarks.gpu.setup import Clock, on_a_card
from benchmarks.gpu.whole_steps import STEPS, TOY_STEPS, WARM_UP_STEPS, WholeStep, one_step
from tests.nullgpu.computed import stand_in
from tests.nullgpu.log import Entry, Log, logged, mark
from tiercel.config.schema import Optim
from tiercel.distributed.strategies.optimizer import build_optimizer
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.engine import LocalSampler

PHASES = ("vision", "rollout", "learn", "update")
PHASE, TOUCHES = "phase", "touches "


def step_of(model: str) -> WholeStep:
    """Return the first step of this model."""
    return next(step for step in (*STEPS.values(), *TOY_STEPS.values()) if step.model == model)


def mark_calls() -> None:
    """Mark in the log where each phase begins, and before each fused kernel the bytes of its tensors."""
    running, run_kernel = Clock.running, CachingAutotuner.run

    def marked(self: Clock) -> Any:
        mark(PHASE)
        return running(self)

    def weighed(self: CachingAutotuner, *given: Any, **options: Any) -> Any:
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        mark(f"{TOUCHES}{sum(each.numel() * each.element_size() for each in tensors)}")
        return run_kernel(self, *given, **options)

    Clock.running, CachingAutotuner.run = marked, weighed


def run(step: WholeStep) -> dict[str, list[Entry]]:
    """Run a few steps, and return the calls of the last by phase."""
    setup = on_a_card()
    policy = random_policy(MODELS[step.model], setup.device, setup.dtype)
    vision = VisionStore(policy, cache_bytes=0)
    sampler, optimizer = LocalSampler(policy, vision), build_optimizer(policy, Optim())
    with logged() as log:
        for _ in range(WARM_UP_STEPS + 1):
            one_step(sampler, vision, optimizer, step, setup)
    return _phases(log)


def _phases(log: Log) -> dict[str, list[Entry]]:
    starts = [number for number, entry in enumerate(log.entries) if entry.kind == "mark" and entry.name == PHASE]
    first, last = starts[: len(PHASES)], starts[-len(PHASES) :]
    stops = [*last[1:], len(log.entries)]
    found = {name: log.entries[start:stop] for name, start, stop in zip(PHASES, last, stops, strict=True)}
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


def with_bytes(entries: list[Entry]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield the calls as the file has them: fused kernels with one number more, the bytes of their tensors."""
    touched: tuple[int, ...] = ()
    for entry in entries:
        if entry.kind == "mark" and entry.name.startswith(TOUCHES):
            touched = (int(entry.name.removeprefix(TOUCHES)),)
        else:
            yield entry.kind, (*entry.numbers, *touched), entry.name
            touched = ()


def counted(model: str, phases: Mapping[str, list[Entry]]) -> dict[str, Any]:
    """Return the launches of the step by phase, replays not counted, and the most nodes of a decoded token for each
    layer of the decoder."""
    replays = [entry for entry in phases["rollout"] if entry.kind == "graph" and entry.name == "launch"]
    nodes = max((entry.numbers[1] for entry in replays), default=0)
    layers = make_config(MODELS[model]).get_text_config().num_hidden_layers
    captured = {id(entry) for entry in _captures(phases["rollout"])}
    launches = {
        phase: sum(each.kind in {"launch", "gemm"} and id(each) not in captured for each in calls)
        for phase, calls in phases.items()
    }
    return {"launches": launches, "token_nodes": nodes, "nodes_per_layer": round(nodes / layers, 1)}


if __name__ == "__main__":
    stand_in()
    mark_calls()
    made = run(step_of(sys.argv[1]))
    content = {phase: list(with_bytes(calls)) for phase, calls in made.items()}
    Path(sys.argv[2]).write_text(json.dumps({"model": sys.argv[1], "phases": content}), encoding="utf-8")
    print(json.dumps(counted(sys.argv[1], made)), flush=True)
