"""Before the first step: engine and trainer see the same prompt and give its completions the same logprobs.

Twice: with the policy as it is, and with an adapter whose weights were moved on purpose, so that an engine that leaves
the adapter out, as a fresh adapter of zeros would let it, is caught.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.config.schema import GrpoRecipe
from tiercel.errors import EnvironmentProblem
from tiercel.learner.batch import AdvantageGroup, group_item
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.sampler import Sampler, SamplingParams, sampling_params
from tiercel.training.engine_gap import engine_name, parity_tolerance
from tiercel.training.sampling import PROBE, PolicySync
from tiercel.training.step import Step
from tiercel.training.trainer import NO_TOTALS, Trainer
from tiercel.types import EncodedPrompt, Group

PROMPTS = 2  # of each rank
COMPLETIONS = 2
TOKENS = 48
MOVED_BY = 4.0  # the moved adapter must change some logprob by this many tolerances
FIRST_NOISE = 0.01  # standard deviation of what is added to each weight, doubled until it shows
DOUBLINGS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Largest difference between the engine's and the trainer's logprobs, over all ranks."""

    largest: float
    row: str


def check_parity(
    sync: PolicySync, trainer: Trainer, recipe: GrpoRecipe, step: Step, say: Callable[[str], None]
) -> None:
    """Raise EnvironmentProblem, on all ranks, where engine and trainer disagree. The engine has the policy of this
    step."""
    sampler = sync.sampler
    if sampler.shares_weights:
        return
    some = _with_pictures_first(step.prompts)[:PROMPTS]
    params = replace(
        sampling_params(recipe.rollout),
        group_size=COMPLETIONS,
        max_new_tokens=min(TOKENS, recipe.rollout.max_new_tokens),
        min_new_tokens=0,
        top_p=1.0,
        top_k=0,
    )
    tolerance = parity_tolerance(recipe)
    name = engine_name(recipe)
    trainer.ranks.together(lambda: sampler.require_usable(some[0]) if some else None)
    groups = _sampled(sampler, trainer, recipe, some, params)
    scores = trainer_logprobs(trainer, groups)
    gap = _gap(trainer, groups, scores)
    if gap.largest > tolerance:
        raise EnvironmentProblem(
            f"{name}: its logprobs differ from the trainer's by up to {gap.largest:.2g} (row {gap.row}), "
            f"rollout.parity_tolerance is {tolerance:g}: other weights, another dtype, raw logprobs or other picture "
            "sizes; give the engine the recipe's model.path, model.dtype and pixel limits"
        )
    with _moved(trainer, recipe, groups, scores, MOVED_BY * tolerance):
        sync.load(PROBE)
        probed = _sampled(sampler, trainer, recipe, some, params)
        moved = _gap(trainer, probed, trainer_logprobs(trainer, probed))
    sync.load(step.number)
    if moved.largest > tolerance:
        raise EnvironmentProblem(
            f"{name}: with an adapter that is not zero its logprobs differ from the trainer's by up to "
            f"{moved.largest:.2g} (row {moved.row}), without by {gap.largest:.2g}: the engine leaves the adapter out, "
            "or applies other weights or another scale; check that it loads LoRA for every layer of lora.targets"
        )
    say(f"engine and trainer agree: logprobs within {gap.largest:.1g}, with a moved adapter within {moved.largest:.1g}")


@contextmanager
def _moved(
    trainer: Trainer, recipe: GrpoRecipe, groups: Sequence[Group], scores: Sequence[Tensor], wanted_shift: float
) -> Iterator[None]:
    """Inside, the adapter is moved so far that the trainer's own logprobs, which were `scores`, shift by
    `wanted_shift` or more."""
    for doubling in range(DOUBLINGS):
        with trainer.strategy.moved(_noise(recipe.train.seed, FIRST_NOISE * 2**doubling)):
            shifted = trainer_logprobs(trainer, groups)
            shift = max((float((a - b).abs().max()) for a, b in zip(scores, shifted, strict=True)), default=0.0)
            if max(trainer.ranks.gather(shift)) >= wanted_shift:
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
    sampler: Sampler, trainer: Trainer, recipe: GrpoRecipe, prompts: Sequence[EncodedPrompt], params: SamplingParams
) -> tuple[Group, ...]:
    seeds = [sampling_seed(recipe.train.seed, prompt.index) for prompt in prompts]
    with sampler.awake():
        return trainer.ranks.together(lambda: sampler.sample_everywhere(prompts, params, seeds))


def trainer_logprobs(trainer: Trainer, groups: Sequence[Group]) -> list[Tensor]:
    """Compute for each group the logprobs (N,) of its completions' tokens, one completion after the other."""
    whole = [
        AdvantageGroup(
            item=group_item(group.prompt, group.completions),
            advantages_G=torch.zeros(len(group.completions)),
            sampler_logprobs=tuple(completion.logprobs_L for completion in group.completions),
        )
        for group in groups
    ]
    units = trainer.units(whole, NO_TOTALS)
    found = [scores.logprobs_N.cpu() for unit in units for scores in trainer.scores(unit)]
    trainer.vision.end_step()
    lengths = [sum(len(logprobs) for logprobs in group.sampler_logprobs) for group in whole]
    return list(torch.cat([*found, torch.empty(0)]).split(lengths)) if lengths else []


def _gap(trainer: Trainer, groups: Sequence[Group], scores: Sequence[Tensor]) -> Gap:
    gaps = [Gap(largest=0.0, row="(none)")]
    for group, scores_N in zip(groups, scores, strict=True):
        theirs_N = torch.cat([completion.logprobs_L for completion in group.completions])
        differences_N = (theirs_N - scores_N)[~theirs_N.isnan()].abs()
        if len(differences_N):
            gaps.append(Gap(largest=float(differences_N.max()), row=group.prompt.row.id))
    return max((gap for each in trainer.ranks.gather(gaps) for gap in each), key=lambda gap: gap.largest)


def _with_pictures_first(prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    return sorted(prompts, key=lambda prompt: not prompt.images)
