"""Before the first step: engine and trainer see the same prompt and give its completions the same logprobs.

Twice: with the policy as it is, and with an adapter whose weights were moved on purpose, so that an engine that leaves
the adapter out, as a fresh adapter of zeros would let it, is caught.

In a narrow dtype a healthy engine has tokens that are off by more than the tolerance: bfloat16 keeps logits between 32
and 64 in steps of 0.25. So there the mean, a high quantile and the largest difference have limits of their own, in
tolerances. In float32 the largest difference is held to the tolerance itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.config.schema import GrpoRecipe
from tiercel.errors import EnvironmentProblem
from tiercel.learner.batch import advantage_group
from tiercel.models.turns import second_turn
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.sampler import GatedSampler, SamplingParams, sampling_params
from tiercel.training.engine_gap import engine_name, parity_tolerance
from tiercel.training.forward import NO_TOTALS
from tiercel.training.sampling import PROBE, PolicySync
from tiercel.training.step import Step
from tiercel.training.trainer import Trainer
from tiercel.types import EncodedPrompt, Group

PROMPTS = 2  # of each rank
COMPLETIONS = 2
TOKENS = 48
MOVED_BY = 8.0  # the moved adapter must change logprobs by this many tolerances
FIRST_NOISE = 0.01  # standard deviation of what is added to each weight, doubled until it shows
DOUBLINGS = 10
QUANTILE = 0.99
MEAN, HIGH, LARGEST = 0.5, 2.0, 8.0  # limits in a narrow dtype, in tolerances


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Holds differences between logprobs of the same tokens, in nats, over all ranks."""

    mean: float = 0.0
    high: float = 0.0  # the QUANTILE of them
    largest: float = 0.0
    row: str = "(none)"  # that of the largest

    @classmethod
    def of(cls, differences: Sequence[tuple[str, Tensor]]) -> "Gap":
        """Sum up the differences of each row's tokens, by its id."""
        known = [(row, values_N) for row, values_N in differences if len(values_N)]
        if not known:
            return cls()
        all_N = torch.cat([values_N for _, values_N in known])
        row, values_N = max(known, key=lambda entry: float(entry[1].max()))
        return cls(
            mean=float(all_N.mean()),
            high=float(all_N.quantile(QUANTILE, interpolation="lower")),
            largest=float(values_N.max()),
            row=row,
        )

    def __str__(self) -> str:
        return (
            f"up to {self.largest:.2g} (row {self.row}), {self.high:.2g} at the {QUANTILE} quantile and "
            f"{self.mean:.2g} on average"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateLimits:
    """Holds the largest values of a `Gap` that the gate admits."""

    mean: float
    high: float
    largest: float

    @classmethod
    def of(cls, recipe: GrpoRecipe) -> "GateLimits":
        """Compute the limits as the text at the top of this file explains."""
        tolerance = parity_tolerance(recipe)
        if recipe.model.dtype == "float32":
            return cls(mean=tolerance, high=tolerance, largest=tolerance)
        return cls(mean=MEAN * tolerance, high=HIGH * tolerance, largest=LARGEST * tolerance)

    def admit(self, gap: Gap) -> bool:
        """Tell whether engine and trainer agree."""
        return gap.mean <= self.mean and gap.high <= self.high and gap.largest <= self.largest


def check_parity(
    sync: PolicySync, trainer: Trainer, recipe: GrpoRecipe, step: Step, say: Callable[[str], None]
) -> None:
    """Raise EnvironmentProblem, on all ranks, where engine and trainer disagree. The engine has the policy of this
    step."""
    sampler = sync.sampler
    if not isinstance(sampler, GatedSampler):
        return
    some = sorted(step.prompts, key=lambda prompt: not prompt.images)[:PROMPTS]
    if recipe.rollout.has_turns:
        some += [second_turn(trainer.family, prompt) for prompt in some[:1]]
    params = replace(
        sampling_params(recipe.rollout),
        group_size=COMPLETIONS,
        max_new_tokens=min(TOKENS, recipe.rollout.max_new_tokens),
        min_new_tokens=0,
        top_p=1.0,
        top_k=0,
    )
    tolerance, limits = parity_tolerance(recipe), GateLimits.of(recipe)
    name = engine_name(recipe)
    trainer.ranks.together(lambda: sampler.require_usable(some[0]) if some else None)
    groups = _sampled(sampler, trainer, recipe, some, params)
    scores = trainer_logprobs(trainer, groups)
    gap = _gap(trainer, groups, scores)
    if not limits.admit(gap):
        quantize = recipe.model.quantize
        own = (
            f"the trainer's weights are in {quantize}, by model.quantize, and an engine's are not; or "
            if quantize
            else ""
        )
        raise EnvironmentProblem(
            f"{name}: its logprobs differ from the trainer's by {gap}, "
            f"rollout.parity_tolerance is {tolerance:g}: {own}other weights, another dtype, raw logprobs or other "
            "picture sizes; give the engine the recipe's model.path, model.dtype and pixel limits"
        )
    with _moved(trainer, recipe, groups, scores, MOVED_BY * tolerance):
        sync.load(PROBE)
        probed = _sampled(sampler, trainer, recipe, some, params)
        moved = _gap(trainer, probed, trainer_logprobs(trainer, probed))
    sync.load(step.number)
    if not limits.admit(moved):
        raise EnvironmentProblem(
            f"{name}: with an adapter that is not zero its logprobs differ from the trainer's by {moved}, without by "
            f"up to {gap.largest:.2g}: the engine leaves the adapter out, or applies other weights or another scale; "
            "check that it loads LoRA for every layer of lora.targets"
        )
    say(f"engine and trainer agree: logprobs within {gap.largest:.1g}, with a moved adapter within {moved.largest:.1g}")


@contextmanager
def _moved(
    trainer: Trainer, recipe: GrpoRecipe, groups: Sequence[Group], scores: Sequence[Tensor], wanted_shift: float
) -> Iterator[None]:
    """Inside, the adapter is moved so far that the high quantile of the shifts of the trainer's own logprobs, which
    were `scores`, is `wanted_shift` or more."""
    for doubling in range(DOUBLINGS):
        with trainer.strategy.moved(_noise(recipe.train.seed, FIRST_NOISE * 2**doubling)):
            shifted = trainer_logprobs(trainer, groups)
            if _gap(trainer, groups, scores, shifted).high >= wanted_shift:
                yield
                return
    raise EnvironmentProblem("no noise on the adapter changes the policy's logprobs; is lora.alpha 0?")


def _noise(seed: int, scale: float) -> Callable[[Tensor], Tensor]:
    """Make a function that adds normal noise to one weight after the other; in the same order it is the same on every
    rank."""
    generator = torch.Generator().manual_seed(seed)

    def add(weight: Tensor) -> Tensor:
        return weight + scale * torch.randn(weight.shape, generator=generator).to(weight)

    return add


def _sampled(
    sampler: GatedSampler,
    trainer: Trainer,
    recipe: GrpoRecipe,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
) -> tuple[Group, ...]:
    seeds = [sampling_seed(recipe.train.seed, prompt.index) for prompt in prompts]
    with sampler.awake():
        return trainer.ranks.together(lambda: sampler.sample_everywhere(prompts, params, seeds))


def trainer_logprobs(trainer: Trainer, groups: Sequence[Group]) -> list[Tensor]:
    """Compute for each group the logprobs (N,) of its completions' tokens, one completion after the other."""
    whole = [advantage_group(group.prompt, group.completions, [0.0] * len(group.completions)) for group in groups]
    units = trainer.units(whole, NO_TOTALS)
    found = [scores.logprobs_N.cpu() for unit in units for scores in trainer.scores(unit)]
    trainer.vision.end_step()
    lengths = [sum(len(logprobs) for logprobs in group.sampler_logprobs) for group in whole]
    return list(torch.cat([*found, torch.empty(0)]).split(lengths)) if lengths else []


def _gap(
    trainer: Trainer, groups: Sequence[Group], scores: Sequence[Tensor], others: Sequence[Tensor] | None = None
) -> Gap:
    """Compare logprobs of the groups' tokens with `others`; None: with those of the engine."""
    if others is None:
        others = [torch.cat([completion.logprobs_L for completion in group.completions]) for group in groups]
    differences = [
        (group.prompt.row.id, (b_N - a_N)[~b_N.isnan()].abs())
        for group, a_N, b_N in zip(groups, scores, others, strict=True)
    ]
    return Gap.of([entry for each in trainer.ranks.gather(differences) for entry in each])
