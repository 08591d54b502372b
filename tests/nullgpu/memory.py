"""A run of a full-size model in PyTorch's own allocator: `python -m tests.nullgpu.memory RECIPE RANKS` runs two
steps of the first rank and prints the bytes of the second by phase. The recipe's checkpoint needs no weights."""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.nullgpu.computed import stand_in
from tests.nullgpu.full_size import weights_made_on
from tiercel.config import GrpoRecipe
from tiercel.distributed import ranks
from tiercel.distributed.ranks import joined_ranks
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.runs.directory import open_run
from tiercel.training.grpo.loop import steps
from tiercel.training.session import Session
from tiercel.training.step import Step

UPDATE = "update"
PHASES = ("rollout", "learn")  # as the loop names them; the update is a part of the second


class Peaks:
    """The most bytes that tensors took and that the allocator held, by phase."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Measure a phase. One inside it counts on its own, and not towards it."""
        self._begin()
        yield
        self._end(phase)

    @contextmanager
    def inside(self, outer: str, phase: str) -> Iterator[None]:
        """Interrupt the measurement of a phase by that of another."""
        self._end(outer)
        with self.of(phase):
            yield
        torch.cuda.reset_peak_memory_stats()

    def _begin(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def _end(self, phase: str) -> None:
        now = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        before = self.found.get(phase, {})
        self.found[phase] = {kind: max(size, before.get(kind, 0)) for kind, size in now.items()}


def measure_phases(peaks: Peaks) -> None:
    """Make a run measure its phases."""
    phase, update = Step.phase, torch.optim.AdamW.step

    @contextmanager
    def measured_phase(self: Step, name: str, *given: Any, **options: Any) -> Iterator[None]:
        with phase(self, name, *given, **options):
            if name not in PHASES:
                yield
                return
            with peaks.of(name):
                yield

    def measured_update(self: torch.optim.AdamW, *given: Any) -> Any:
        with peaks.inside("learn", UPDATE):
            return update(self, *given)

    Step.phase = measured_phase
    torch.optim.AdamW.step = measured_update


def pretend_ranks(count: int) -> None:
    """Let this process be the first of several ranks of which no other is there. Collectives move nothing, and others
    say what this one says."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks._meeting_place = lambda patience: (FakeStore(), 0, count)
    ranks._backend = lambda has_gpu: "fake"
    dist.all_gather_object = lambda found, value: found.__setitem__(slice(None), [value] * count)
    dist.gather_object = lambda value, found: found.__setitem__(slice(None), [value] * count)
    dist.broadcast_object_list = dist.send_object_list = lambda *given, **options: None


def run(recipe: GrpoRecipe) -> dict[str, dict[str, int]]:
    """Run two steps. The first compiles, captures, and makes the moments."""
    peaks = Peaks()
    measure_phases(peaks)
    Session.save_if_due = lambda *given: None  # gigabytes of a disk
    device, is_sharded = torch.device("cuda"), recipe.train.strategy == "fsdp2"
    with (
        joined_ranks(60, Heartbeat()) as joined,
        weights_made_on(device, sharded=is_sharded),
        open_run(recipe, joined) as directory,
    ):
        for number, _ in enumerate(steps(recipe, directory), start=1):
            if number == recipe.train.steps:
                break
            peaks.found.clear()
    return peaks.found


if __name__ == "__main__":
    stand_in()
    asked = GrpoRecipe.model_validate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if (world_size := int(sys.argv[2])) > 1:
        pretend_ranks(world_size)
    print(json.dumps(run(asked)), flush=True)
