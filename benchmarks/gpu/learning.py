"""Parts c and f: time, memory and MFU of an update without the optimiser, in the shapes of Qwen2.5-VL 3B and 7B.

tiercel's learner and the plain one (transformers' own forward pass, with the prompt repeated for every completion)
compute the same loss of the same groups with the same weights and the same vision tower; patches are made in advance.
MFU counts the operations that a learner needs with the prompts that it computes, vision included, without recomputed
layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.flops import decoder_shape
from benchmarks.gpu.learners import PlainLearner, SharedLearner, set_checkpointing
from benchmarks.gpu.models import MODELS, random_policy
from benchmarks.gpu.running import Cell, verdict
from benchmarks.gpu.setup import Clock, Setup
from benchmarks.gpu.steps import SHAPES, TOY_SHAPES, Shape, make_groups
from benchmarks.peers_report import rounded, spread
from tiercel.models.policy import Policy
from tiercel.packing.batch import AdvantageGroup

BUDGET = 8192  # tokens of a microbatch
GRADIENT_LIMIT = 0.05  # between two computations in bfloat16; part a has the exact limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A learner and its settings."""

    name: str
    settings: Mapping[str, Any]  # keys of the recipe's `learner`; for the plain one, only checkpointing
    is_plain: bool = False

    def made(self, policy: Policy, groups: Sequence[AdvantageGroup], budget: int) -> SharedLearner | PlainLearner:
        if not self.is_plain:
            return SharedLearner(policy, groups, {"max_tokens_per_microbatch": budget, **self.settings})
        set_checkpointing(policy, bool(self.settings.get("gradient_checkpointing")))
        return PlainLearner(policy, groups, budget)


CONTENDERS = (
    Contender(name="tiercel", settings={}),
    Contender(name="tiercel, selective checkpointing", settings={"gradient_checkpointing": "selective"}),
    Contender(name="tiercel, full checkpointing", settings={"gradient_checkpointing": True}),
    Contender(name="plain", settings={}, is_plain=True),
    Contender(name="plain, full checkpointing", settings={"gradient_checkpointing": True}, is_plain=True),
)
COMPILED = (
    Contender(name="compile off", settings={"compile": False}),
    Contender(name="compile on", settings={"compile": True}),
    Contender(name="compile on, full checkpointing", settings={"compile": True, "gradient_checkpointing": True}),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A model and the shape of a step."""

    model: str  # in MODELS
    shape_name: str
    shape: Shape
    budget: int

    @property
    def title(self) -> str:
        return f"{self.model}, {self.shape_name}"


def places(is_toy: bool) -> list[Place]:
    """Return the places, with the larger model and image first."""
    shapes, models, budget = (TOY_SHAPES, ["toy"], 64) if is_toy else (SHAPES, ["7b", "3b"], BUDGET)
    return [
        Place(model=model, shape_name=name, shape=shape, budget=budget)
        for model in models
        for name, shape in shapes.items()
    ]


def learner_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield the cells of part c without TRL."""
    for place in places(is_toy):
        for contender in CONTENDERS:
            yield Cell(part="c", name=f"{place.title}, {contender.name}", run=partial(measured, place, contender))
        yield Cell(part="c", name=f"{place.title}, gradients", run=partial(compared, place))


def compile_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield the cells of part f: the first cell of the larger model, and on a card also the smaller one's."""
    first = [place for place in places(is_toy) if place.shape_name == places(is_toy)[0].shape_name]
    for place in first:
        for contender in COMPILED:
            yield Cell(part="f", name=f"{place.title}, {contender.name}", run=partial(measured, place, contender))


def measured(place: Place, contender: Contender, setup: Setup) -> dict[str, Any]:
    """Return the median seconds of an update after one that does not count, peak memory, and MFU."""
    policy = random_policy(MODELS[place.model], setup.device, setup.dtype)
    learner = contender.made(policy, make_groups(policy, place.shape), place.budget)
    first, clock = Clock(setup), Clock(setup)
    with first.running():
        learner.update()
    setup.free()
    for _ in range(setup.repetitions):
        policy.model.zero_grad(set_to_none=True)
        with clock.running():
            learner.update()
    shape = decoder_shape(policy.family.checkpoint.config.get_text_config(), MODELS[place.model].lora_rank)
    operations = learner.flops(shape, is_checkpointed=False)
    seconds = spread(clock.seconds)
    share = setup.share_of_flops(operations.total, seconds["median"])
    return {
        "model": place.model,
        **asdict(place.shape),
        "learner": contender.name,
        "seconds": seconds,
        "first_seconds": rounded(first.seconds[0]),
        "peak_bytes": setup.peak_bytes,
        "operations": {**asdict(operations), "total": operations.total},
        "mfu": None if share is None else rounded(share),
        "tokens_per_microbatch": place.budget,
    }


def compared(place: Place, setup: Setup) -> dict[str, Any]:
    """Compare the gradients of tiercel's learner and of the plain one, each on its own equal weights."""
    found, right = (gradient_of(place, each, setup) for each in (CONTENDERS[0], CONTENDERS[-1]))
    error = float((found - right).norm() / right.norm())
    return verdict(error, GRADIENT_LIMIT, "LoRA gradient, relative")


def gradient_of(place: Place, contender: Contender, setup: Setup) -> Tensor:
    """Return the gradient of all LoRA weights, flat, float32 on the CPU."""
    policy = random_policy(MODELS[place.model], setup.device, setup.dtype)
    contender.made(policy, make_groups(policy, place.shape), place.budget).update()
    gradient = torch.cat([parameter.grad.flatten().cpu() for parameter in policy.trained_parameters().values()])
    del policy
    setup.free()
    return gradient
