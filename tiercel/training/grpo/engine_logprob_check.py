"""The gate before the first step: engine and trainer see the same prompt and give its completions the same logprobs.

It compares twice: with the policy as it is, and with trained weights that were moved on purpose. This catches an engine
that leaves the adapter out, which a fresh adapter of zeros would hide, or that keeps the checkpoint's weights. Each
trained part is moved far enough to catch an engine that leaves out only this part.

In a narrow dtype a healthy engine has tokens that are off by more than the tolerance: bfloat16 keeps logits between 32
and 64 in steps of 0.25. So there the mean, a high quantile and the largest difference have limits of their own, in
tolerances. In float32 the largest difference is held to the tolerance itself.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tiercel.config.schema import GrpoRecipe, Part
from tiercel.errors import EnvironmentProblem
from tiercel.log import logger
from tiercel.models.chat import second_turn
from tiercel.models.policy import base_name
from tiercel.packing.batch import advantage_group, in_completion_order
from tiercel.rollout.sampler import GatedSampler, SamplingParams, sampling_params
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.training.grpo.policy_sync import PROBE, PolicySync
from tiercel.training.grpo.train_inference_mismatch import engine_name, parity_tolerance
from tiercel.training.policy_passes import NO_TOTALS, PolicyPasses
from tiercel.training.step import Step
from tiercel.training.trainer import Trainer
from tiercel.types import EncodedPrompt, Group

PROMPTS = 2  # per rank
COMPLETIONS = 2
MOST_COMPLETIONS = 16  # of a prompt, if they may only be short
TOKENS = 48  # of a completion
MOVED_BY = 8.0  # the moved adapter must change logprobs by this many tolerances
FIRST_NOISE = 0.01  # standard deviation of the noise on each weight of an adapter, doubled until it shows
FIRST_NOISE_WHOLE = 1e-4  # the same in full fine-tuning
DOUBLINGS = 10
HALVINGS = 3  # of the last doubling, in search of the least noise that shows
QUANTILE = 0.99
MEAN, HIGH, LARGEST = 0.5, 2.0, 8.0  # limits in a narrow dtype, in tolerances


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Differences between logprobs of the same tokens, in nats, over all ranks."""

    mean: float = 0.0
    high: float = 0.0  # the QUANTILE of them
    largest: float = 0.0
    row: str = "(none)"  # the row of the largest

    @classmethod
    def of(cls, differences: Sequence[tuple[str, Tensor]]) -> "Gap":
        """Summarise the differences of each row's tokens; each entry has the row's id."""
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
class EngineCheckLimits:
    """The largest values of a `Gap` that the gate accepts."""

    mean: float
    high: float
    largest: float

    @classmethod
    def of(cls, recipe: GrpoRecipe) -> "EngineCheckLimits":
        """Compute the limits that this module's docstring explains."""
        tolerance = parity_tolerance(recipe)
        if recipe.model.dtype == "float32":
            return cls(mean=tolerance, high=tolerance, largest=tolerance)
        return cls(mean=MEAN * tolerance, high=HIGH * tolerance, largest=LARGEST * tolerance)

    def admit(self, gap: Gap) -> bool:
        """Return whether engine and trainer agree."""
        return gap.mean <= self.mean and gap.high <= self.high and gap.largest <= self.largest


def check_engine_logprobs(sync: PolicySync, trainer: Trainer, recipe: GrpoRecipe, step: Step) -> None:
    """Raise EnvironmentProblem, on all ranks, if engine and trainer disagree. The engine must have the policy of this
    step."""
    sampler = sync.sampler
    if not isinstance(sampler, GatedSampler):
        return
    some = sorted(step.prompts, key=lambda prompt: not prompt.images)[:PROMPTS]
    if recipe.rollout.has_turns:
        some += [second_turn(trainer.family, prompt) for prompt in some[:1]]
    tokens = min(TOKENS, recipe.rollout.max_new_tokens)
    params = replace(
        sampling_params(recipe.rollout),
        group_size=min(max(COMPLETIONS, TOKENS // tokens), MOST_COMPLETIONS),
        max_new_tokens=tokens,
        min_new_tokens=0,
        top_p=1.0,
        top_k=0,
    )
    tolerance, limits = parity_tolerance(recipe), EngineCheckLimits.of(recipe)
    name = engine_name(recipe)
    trainer.ranks.run_on_all(lambda: sampler.require_usable(some[0]) if some else None)
    groups = _sampled(sampler, trainer, recipe, some, params)
    scores = trainer_logprobs(trainer, groups)
    gap = _gap(trainer, groups, scores)
    if not limits.admit(gap):
        quantize = recipe.model.quantize
        own = (
            f"the trainer's weights are in {quantize} because of model.quantize, and an engine's are not; or "
            if quantize
            else ""
        )
        raise EnvironmentProblem(
            f"{name}: its logprobs differ from the trainer's by {gap}, but rollout.parity_tolerance is "
            f"{tolerance:g}: {own}other weights, another dtype, raw logprobs or other picture sizes; give the engine "
            "the recipe's model.path, model.dtype and pixel limits"
        )
    with _moved(trainer, recipe, groups, scores):
        sync.update_weights(PROBE)
        probed = _sampled(sampler, trainer, recipe, some, params)
        moved = _gap(trainer, probed, trainer_logprobs(trainer, probed))
    sync.update_weights(step.number)
    what = "moved weights" if recipe.lora is None else "a moved adapter"
    if not limits.admit(moved):
        raise EnvironmentProblem(
            f"{name}: with {what} its logprobs differ from the trainer's by {moved}, otherwise by up to "
            f"{gap.largest:.2g}: {_likely_cause(trainer, recipe)}"
        )
    logger.info(f"engine and trainer agree: logprobs within {gap.largest:.1g}, with {what} within {moved.largest:.1g}")


def _likely_cause(trainer: Trainer, recipe: GrpoRecipe) -> str:
    """Say why an engine that agrees with the policy may not agree with the moved one, and what to do."""
    if recipe.lora is None:
        return "the engine keeps the checkpoint's weights, or some of them; update vLLM, or write rollout.engine: local"
    cause = "the engine leaves the adapter out, or applies other weights or another scale; "
    if recipe.rollout.engine_kind.is_served and not trainer.policy.vision_is_frozen:
        return f"{cause}start the server with --enable-tower-connector-lora, which vision layers need"
    return f"{cause}check that it loads LoRA for every layer of lora.targets"


@contextmanager
def _moved(trainer: Trainer, recipe: GrpoRecipe, groups: Sequence[Group], scores: Sequence[Tensor]) -> Iterator[None]:
    """Move all trained weights inside the context: those of each part so far that by themselves they shift the
    trainer's own logprobs, which were `scores`, by MOVED_BY tolerances or more at the high quantile. The vision part
    may shift them by less, and stays as it is if no rank has a picture."""
    wanted = MOVED_BY * parity_tolerance(recipe)
    first = FIRST_NOISE_WHOLE if recipe.lora is None else FIRST_NOISE
    shows_pictures = trainer.ranks.all_reduce_any(any(group.prompt.images for group in groups))
    parts = [trainer.family.part_of(base_name(name)) for name in trainer.policy.trained_parameters()]
    scales: dict[Part, float] = dict.fromkeys(parts, 0.0)
    for part in [part for part in scales if part == "language" or shows_pictures]:

        def shift_of(scale: float, part: Part = part) -> float:
            alone = [scale if each == part else 0.0 for each in parts]
            with trainer.strategy.moved(_noise(recipe.train.seed, alone)):
                return _gap(trainer, groups, scores, trainer_logprobs(trainer, groups)).high

        scales[part], shift = smallest_scale(shift_of, first, wanted)
        if shift == 0.0 or (part == "language" and shift < wanted):
            raise EnvironmentProblem(
                f"noise on the trained weights of {part} did not change any logprob, so it cannot be seen whether the "
                "engine uses them; lora.alpha may be 0"
            )
        if shift < wanted:
            logger.warning(
                f"the {part} part shifts logprobs by at most {shift:.2g}; an engine without it may not be noticed"
            )
    with trainer.strategy.moved(_noise(recipe.train.seed, [scales[part] for part in parts])):
        yield


def smallest_scale(shift_of: Callable[[float], float], first: float, wanted: float) -> tuple[float, float]:
    """Search for the smallest scale of noise that shifts logprobs by `wanted` or more: doublings from `first`, then
    halvings of the last step. Return the scale and its shift, or those of the largest shift if none is enough.

    The shift grows much faster than the scale, and a policy that is moved far is rounded far in a narrow dtype: of a
    SmolLM2 in bfloat16, noise of 0.04 shifts logprobs by 0.5, and noise of 0.08 by 7.6."""
    shifts: dict[float, float] = {}
    for scale in (first * 2**doubling for doubling in range(DOUBLINGS)):
        shifts[scale] = shift_of(scale)
        if shifts[scale] >= wanted:
            break
    best = max(shifts, key=lambda scale: shifts[scale])
    if shifts[best] < wanted or best == first:
        return best, shifts[best]
    low = best / 2
    for _ in range(HALVINGS):
        middle = (low + best) / 2
        shifts[middle] = shift_of(middle)
        low, best = (low, middle) if shifts[middle] >= wanted else (middle, best)
    return best, shifts[best]


def _noise(seed: int, scales: Sequence[float]) -> Callable[[Tensor], Tensor]:
    """Make a function that adds normal noise to one weight after another, each at its own scale. In the same order, the
    noise is the same on every rank."""
    generator, left = torch.Generator().manual_seed(seed), iter(scales)

    def add(weight: Tensor) -> Tensor:
        noise = next(left) * torch.randn(weight.shape, generator=generator)
        if not isinstance(weight, DTensor):
            return weight + noise.to(weight)
        share = noise.to(device=weight.device, dtype=weight.dtype)
        return weight + distribute_tensor(share, weight.device_mesh, weight.placements, src_data_rank=None)

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
        return trainer.ranks.run_on_all(lambda: sampler.sample_everywhere(prompts, params, seeds))


def trainer_logprobs(trainer: PolicyPasses, groups: Sequence[Group]) -> list[Tensor]:
    """Compute for each group the logprobs (N,) of its completions' tokens, one completion after another."""
    own = [advantage_group(group.prompt, group.completions, [0.0] * len(group.completions)) for group in groups]
    whole = trainer.with_partners(own, lambda group: (group.item,))
    units = trainer.units(whole, NO_TOTALS)
    found = [
        logprobs_L
        for unit in units
        for batch, scores in zip(unit.batches, trainer.scores(unit), strict=True)
        for logprobs_L in scores.logprobs_N.cpu().split(batch.packed.scored_lengths)
    ]
    trainer.vision.end_step()
    rows = iter(in_completion_order(units, found))
    known: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)  # several of a prompt that several servers answer
    for group in whole:
        known[_name(group.item.prompt)].append(torch.cat([next(rows) for _ in group.numbers]))
    return [known[_name(group.prompt)].popleft() for group in groups]


def _name(prompt: EncodedPrompt) -> tuple[int, int]:
    """Return a key for a prompt of the gate: a second turn has the index of the first, and more tokens."""
    return prompt.index, len(prompt.token_ids_P)


def _gap(
    trainer: Trainer, groups: Sequence[Group], scores: Sequence[Tensor], others: Sequence[Tensor] | None = None
) -> Gap:
    """Compare logprobs of the groups' tokens with `others`, or with the engine's if that is None."""
    if others is None:
        others = [torch.cat([completion.logprobs_L for completion in group.completions]) for group in groups]
    differences = [
        (group.prompt.row.id, (b_N - a_N)[~b_N.isnan()].abs())
        for group, a_N, b_N in zip(groups, scores, others, strict=True)
    ]
    return Gap.of([entry for each in trainer.ranks.all_gather(differences) for entry in each])
