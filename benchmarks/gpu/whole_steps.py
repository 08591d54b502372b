"""Part e: whole GRPO steps on one card: vision, rollout by the local engine, learner, optimiser.

Weights are random, so no completion ends by itself: each has exactly the number of tokens of its shape.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.decoding import params_of
from benchmarks.gpu.learners import SharedLearner
from benchmarks.gpu.learning import BUDGET
from benchmarks.gpu.models import MODELS, KeepsPatches, random_policy
from benchmarks.gpu.running import Cell
from benchmarks.gpu.setup import Clock, Setup
from benchmarks.gpu.steps import Shape, make_prompts
from benchmarks.peers_report import rounded
from tiercel.config.schema import Optim
from tiercel.distributed.strategies.optimizer import build_optimizer
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.batch import AdvantageGroup, group_item
from tiercel.rollout.local.engine import LocalSampler
from tiercel.types import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeStep:
    """A step, and the part of its prompts that is run. The rest is extrapolated by the number of prompts."""

    model: str
    shape: Shape
    run_groups: int
    budget: int

    @property
    def part(self) -> Shape:
        return replace(self.shape, groups=self.run_groups)


LARGE = Shape(side=952, prompt_tokens=1180, completion_tokens=200, group_size=8)
# EasyR1's geometry3k: 512 prompts x 5. Its completions end by themselves, at 2,048 tokens at the latest.
GEOMETRY = Shape(side=672, prompt_tokens=700, completion_tokens=512, group_size=5, groups=512)
WARM_UP_STEPS = 2  # the first learns; the second compiles for the prompts what the first compiled to learn
STEPS = {
    "7b, 8 prompts x 8, 952 x 952, 200 tokens": WholeStep(model="7b", shape=LARGE, run_groups=8, budget=BUDGET),
    "3b, geometry3k, 512 tokens": WholeStep(model="3b", shape=GEOMETRY, run_groups=32, budget=BUDGET),
    "3b, geometry3k, 2,048 tokens (the longest)": WholeStep(
        model="3b", shape=replace(GEOMETRY, completion_tokens=2048), run_groups=16, budget=2 * BUDGET
    ),
}
TOY_STEPS = {
    "toy": WholeStep(
        model="toy",
        shape=Shape(side=56, prompt_tokens=14, completion_tokens=6, group_size=3, groups=4),
        run_groups=2,
        budget=64,
    )
}


def step_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield the steps of part e."""
    for name, step in (TOY_STEPS if is_toy else STEPS).items():
        yield Cell(part="e", name=name, run=partial(measured, step))


def measured(step: WholeStep, setup: Setup) -> dict[str, Any]:
    """Return the seconds by phase of the last step, after those that capture, compile and allocate."""
    policy = random_policy(MODELS[step.model], setup.device, setup.dtype)
    vision = VisionStore(policy, cache_bytes=0)
    sampler, optimizer = LocalSampler(policy, vision), build_optimizer(policy, Optim())
    for _ in range(WARM_UP_STEPS):
        one_step(sampler, vision, optimizer, step, setup)
    setup.free()
    seconds = one_step(sampler, vision, optimizer, step, setup)
    total = sum(seconds.values())
    factor = step.shape.groups / step.run_groups
    return {
        "model": step.model,
        **asdict(step.shape),
        "run_groups": step.run_groups,
        "seconds": {phase: rounded(value) for phase, value in seconds.items()},
        "total_seconds": rounded(total),
        "extrapolated_seconds": rounded(total * factor),
        "is_extrapolated": factor > 1,
        "tokens_per_microbatch": step.budget,
        "peak_bytes": setup.peak_bytes,
    }


def one_step(
    sampler: LocalSampler, vision: VisionStore, optimizer: torch.optim.Optimizer, step: WholeStep, setup: Setup
) -> dict[str, float]:
    """Run one step and return the seconds by phase. Patches are made in advance."""
    policy, shape, clock = sampler.policy, step.part, Clock(setup)
    prompts = make_prompts(policy, shape)
    assert isinstance(policy.family, KeepsPatches)
    images = [image for prompt in prompts for image in prompt.images]
    policy.family.make_beforehand(images, policy)
    with clock.running():
        vision.features(images)
    with clock.running():
        seeds = [1000 * prompt.index for prompt in prompts]
        sampled = sampler.sample(prompts, params_of(shape.group_size, shape.completion_tokens), seeds)
    settings = {"max_tokens_per_microbatch": step.budget}
    learner = SharedLearner(policy, [scored(group) for group in sampled], settings, vision)
    with clock.running():
        learner.update()
    with clock.running():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    vision.end_step()
    return dict(zip(("vision", "rollout", "learn", "update"), clock.seconds, strict=True))


def scored(group: Group) -> AdvantageGroup:
    """Return a sampled group with normally distributed advantages."""
    generator = torch.Generator().manual_seed(group.prompt.index)
    return AdvantageGroup(
        item=group_item(group.prompt, group.completions),
        numbers=tuple(range(len(group.completions))),
        advantages_G=torch.randn(len(group.completions), generator=generator),
        sampler_logprobs=tuple(completion.logprobs_L for completion in group.completions),
    )
