"""Before the first step: engine and trainer see the same prompt and give its completions the same logprobs.

Twice: with the policy as it is, and with an adapter whose weights were moved on purpose, so that an engine that leaves
the adapter out, as a fresh adapter of zeros would let it, is caught.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.config.schema import GrpoRecipe
from tiercel.errors import EnvironmentProblem
from tiercel.learner.batch import AdvantageGroup, PolicyUnit, empty_unit, group_item, policy_units
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.sampler import Sampler, SamplingParams, sampling_params
from tiercel.training.engine_gap import engine_name, parity_tolerance
from tiercel.training.sampling import PROBE, PolicySync
from tiercel.training.sharing import padding_item, passes_to_add
from tiercel.training.update import Engine, unit_scores
from tiercel.types import EncodedPrompt, Group

PROMPTS = 2  # of each rank
COMPLETIONS = 2
TOKENS = 48
MOVED_BY = 4.0  # the moved adapter must change some logprob by this many tolerances
FIRST_NOISE = 0.01  # standard deviation of what is added to each weight, doubled until it shows
DOUBLINGS = 10
NO_TOTALS = Totals(tokens=1, completions=1, groups=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Largest difference between the engine's and the trainer's logprobs, over all ranks."""

    largest: float
    row: str


def check_parity(
    sync: PolicySync,
    sampler: Sampler,
    engine: Engine,
    recipe: GrpoRecipe,
    prompts: Sequence[EncodedPrompt],
    version: int,
    say: Callable[[str], None],
) -> None:
    """Raises EnvironmentProblem, on all ranks, where the engine, which has this version, and the trainer disagree."""
    if sampler.shares_weights:
        return
    some = _with_pictures_first(prompts)[:PROMPTS]
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
    engine.ranks.together(lambda: sampler.require_usable(some[0]) if some else None)
    groups = _sampled(sampler, engine, recipe, some, params)
    scores = trainer_logprobs(engine, recipe, groups)
    gap = _gap(engine, groups, scores)
    if gap.largest > tolerance:
        raise EnvironmentProblem(
            f"{name}: its logprobs differ from the trainer's by up to {gap.largest:.2g} (row {gap.row}), "
            f"rollout.parity_tolerance is {tolerance:g}: other weights, another dtype, raw logprobs or other picture "
            "sizes; give the engine the recipe's model.path, model.dtype and pixel limits"
        )
    with _moved(engine, recipe, groups, scores, MOVED_BY * tolerance):
        sync.load(PROBE)
        probed = _sampled(sampler, engine, recipe, some, params)
        moved = _gap(engine, probed, trainer_logprobs(engine, recipe, probed))
    sync.load(version)
    if moved.largest > tolerance:
        raise EnvironmentProblem(
            f"{name}: with an adapter that is not zero its logprobs differ from the trainer's by up to "
            f"{moved.largest:.2g} (row {moved.row}), without by {gap.largest:.2g}: the engine leaves the adapter out, "
            "or applies other weights or another scale; check that it loads LoRA for every layer of lora.targets"
        )
    say(f"engine and trainer agree: logprobs within {gap.largest:.1g}, with a moved adapter within {moved.largest:.1g}")


@contextmanager
def _moved(
    engine: Engine, recipe: GrpoRecipe, groups: Sequence[Group], scores: Sequence[Tensor], wanted_shift: float
) -> Iterator[None]:
    """Inside, the adapter is moved so far that the trainer's own logprobs, which were `scores`, shift by
    `wanted_shift` or more."""
    for doubling in range(DOUBLINGS):
        with engine.strategy.moved(_noise(recipe.train.seed, FIRST_NOISE * 2**doubling)):
            shifted = trainer_logprobs(engine, recipe, groups)
            shift = max((float((a - b).abs().max()) for a, b in zip(scores, shifted, strict=True)), default=0.0)
            if max(engine.ranks.gather(shift)) >= wanted_shift:
                yield
                return
    raise EnvironmentProblem("no noise on the adapter changes the policy's logprobs; is lora.alpha 0?")


def _noise(seed: int, scale: float) -> Callable[[Tensor], Tensor]:
    """Adds normal noise to one weight after the other, in their order the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def add(weight: Tensor) -> Tensor:
        return weight + scale * torch.randn(weight.shape, generator=generator).to(weight)

    return add


def _sampled(
    sampler: Sampler, engine: Engine, recipe: GrpoRecipe, prompts: Sequence[EncodedPrompt], params: SamplingParams
) -> tuple[Group, ...]:
    seeds = [sampling_seed(recipe.train.seed, prompt.index) for prompt in prompts]
    with sampler.awake():
        return engine.ranks.together(lambda: sampler.sample_everywhere(prompts, params, seeds))


def trainer_logprobs(engine: Engine, recipe: GrpoRecipe, groups: Sequence[Group]) -> list[Tensor]:
    """For each group the logprobs (N,) of its completions' tokens, laid end to end."""
    found = []
    budget = recipe.learner.max_tokens_per_microbatch
    strategy = engine.strategy

    def units_of(group: Group) -> list[PolicyUnit]:
        whole = AdvantageGroup(
            item=group_item(group.prompt, group.completions),
            advantages_G=torch.zeros(len(group.completions)),
            sampler_logprobs=tuple(completion.logprobs_C for completion in group.completions),
        )
        return policy_units([whole], NO_TOTALS, engine.learner.form, budget, strategy.passes_are_private)

    units = engine.ranks.together(lambda: [units_of(group) for group in groups])
    for of_group in units:
        found.append(torch.cat([scores.logprobs_N.cpu() for unit in of_group for scores in unit_scores(engine, unit)]))
    own = sum(map(len, units))
    missing = passes_to_add(engine.ranks, own, passes_are_private=strategy.passes_are_private)
    for _ in range(missing):
        unit_scores(engine, empty_unit(padding_item(engine.policy.family), NO_TOTALS))
    engine.vision.end_step()
    return found


def _gap(engine: Engine, groups: Sequence[Group], scores: Sequence[Tensor]) -> Gap:
    gaps = [Gap(largest=0.0, row="(none)")]
    for group, scores_N in zip(groups, scores, strict=True):
        theirs_N = torch.cat([completion.logprobs_C for completion in group.completions])
        differences_N = (theirs_N - scores_N)[~theirs_N.isnan()].abs()
        if len(differences_N):
            gaps.append(Gap(largest=float(differences_N.max()), row=group.prompt.row.id))
    return max((gap for each in engine.ranks.gather(gaps) for gap in each), key=lambda gap: gap.largest)


def _with_pictures_first(prompts: Sequence[EncodedPrompt]) -> list[EncodedPrompt]:
    return sorted(prompts, key=lambda prompt: not prompt.images)
