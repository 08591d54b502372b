"""Advantages of completions from their rewards. Shapes: see types.py.

C are the scorable completions of a step over all ranks, in the global order of their prompts. A group is a run of equal
numbers in `group_of_C`. A group whose rewards are all equal gets exact zeros if its own mean is the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Tag

from tiercel.algorithms.custom import own_advantages
from tiercel.algorithms.types import Described, Options, RewardTable
from tiercel.config_base import SECTION_FORM, TEXT_FORM, PositiveFloat, PositiveInt, Section, form_of

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-4


def centred(values_G: Tensor) -> Tensor:
    """Compute r - mean, which is exactly zero if all values are equal."""
    return values_G.new_zeros(values_G.shape) if _all_equal(values_G) else values_G - values_G.mean()


def by_group_mean(table: RewardTable, options: Options) -> Tensor:
    """Compute r - mean of the group."""
    return _by_group(table, centred)


def by_others_mean(table: RewardTable, options: Options) -> Tensor:
    """Compute r - mean of the group's other completions = (r - mean) G / (G - 1)."""
    return _by_group(table, lambda rewards_G: centred(rewards_G) * (len(rewards_G) / max(1, len(rewards_G) - 1)))


def by_batch(table: RewardTable, options: Options) -> Tensor:
    """Compute (r - mean) / std over all completions of the step."""
    return whitened(table.totals_C)


def by_group_mean_and_batch_std(table: RewardTable, options: Options) -> Tensor:
    """Compute r - mean of the group, divided by the standard deviation of that difference over the whole step."""
    centred_C = by_group_mean(table, options)
    return centred_C / (_std(centred_C) + EPSILON)


def each_reward_by_group(table: RewardTable, options: Options) -> Tensor:
    """Normalise each reward separately in its group, and then the weighted sum of the rewards over the step. A reward
    that does not apply to a completion adds nothing to its sum."""
    sums_C = table.totals_C.new_zeros(table.totals_C.shape)
    for rewards_C, weight in zip(table.rewards_CF.unbind(1), table.weights_F, strict=True):
        for run in table.groups():
            applies_G = ~rewards_C[run].isnan()
            applying = rewards_C[run][applies_G]
            if len(applying) > 1:
                sums_C[run][applies_G] += weight * centred(applying) / (_std(applying) + EPSILON)
    return sums_C / (_std(sums_C) + EPSILON)  # their mean is 0 already; rounding must not shift a group's exact zeros


def by_pass_at_k(table: RewardTable, options: Options) -> Tensor:
    """Count all draws of k completions from a group of G with w wrong ones; a draw passes if one of its k is right.

    P = 1 - C(w, k) / C(G, k), s = sqrt(P (1 - P)); a right one gets (1 - P) / s, a wrong one (1 - P - C(w - 1, k - 1) /
    C(G - 1, k - 1)) / s. All are exactly zero if s is 0.
    """
    assert options.pass_k is not None
    advantages_C = table.totals_C.new_zeros(table.totals_C.shape)
    for run in table.groups():
        is_correct_G = table.is_correct_C[run]
        size, wrong = len(is_correct_G), int((~is_correct_G).sum())
        k = min(options.pass_k, size)
        passes = 1 - math.comb(wrong, k) / math.comb(size, k)
        deviation = math.sqrt(passes * (1 - passes))
        if deviation > 0:
            fails_with_it = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
            right, mistaken = (1 - passes) / deviation, (1 - passes - fails_with_it) / deviation
            advantages_C[run].fill_(mistaken).masked_fill_(is_correct_G, right)
    return advantages_C


def whitened(values_C: Tensor) -> Tensor:
    """Compute (x - mean) / (std + 1e-4), which is exactly zero if all values are equal."""
    return centred(values_C) / (_std(values_C) + EPSILON)


def scale_by_group(table: RewardTable, values_C: Tensor) -> Tensor:
    """Divide by the standard deviation (ddof 1) of the group's rewards + 1e-4."""
    scaled_C = values_C.clone()
    for run in table.groups():
        scaled_C[run] /= _std(table.totals_C[run]) + EPSILON
    return scaled_C


def scale_by_batch(table: RewardTable, values_C: Tensor) -> Tensor:
    """Divide by the standard deviation (ddof 1) of all rewards of the step + 1e-4."""
    return values_C / (_std(table.totals_C) + EPSILON)


def unscaled(table: RewardTable, values_C: Tensor) -> Tensor:
    """Return the values unchanged."""
    return values_C


def _by_group(table: RewardTable, baseline: Callable[[Tensor], Tensor]) -> Tensor:
    values_C = table.totals_C.clone()
    for run in table.groups():
        values_C[run] = baseline(values_C[run])
    return values_C


def _all_equal(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _std(values: Tensor) -> Tensor:
    """Compute the standard deviation with ddof 1, or 0 for fewer than two values."""
    return values.std(unbiased=True) if len(values) > 1 else values.new_zeros(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage(Described):
    """An advantage that a recipe can name."""

    baseline: Callable[[RewardTable, Options], Tensor]  # -> (C,)
    scale: str | None  # one of SCALES, if the recipe names none; None: it has its own scale
    least_group: int = 2  # a group with fewer scorable completions is dropped
    depends_on: Literal["totals", "rewards", "right", "all"] = (
        "totals"  # the fields of the RewardTable that it needs; without them it is 0
    )
    needs_pass_k: bool = False


SCALES: dict[str, Callable[[RewardTable, Tensor], Tensor]] = {
    "group": scale_by_group,
    "batch": scale_by_batch,
    "none": unscaled,
}

ADVANTAGES: dict[str, Advantage] = {
    "group_norm": Advantage(
        baseline=by_group_mean,
        scale="group",
        formula="(r - mean of the group) / (std of the group + 1e-4)",
        source="DeepSeekMath 2024",
        use="the default",
    ),
    "group_centred": Advantage(
        baseline=by_group_mean,
        scale="none",
        formula="r - mean of the group",
        source="Dr. GRPO: Liu et al. 2025",
        use="no extra weight for prompts that are nearly always, or nearly never, solved; with `scale: batch` the "
        'local mean and global deviation of Liu et al. 2025, "Tricks or traps"',
    ),
    "rloo": Advantage(
        baseline=by_others_mean,
        scale="none",
        formula="r - mean of the group's others",
        source="RLOO: Ahmadian et al. 2024",
        use="an unbiased baseline; small groups",
    ),
    "reinforce_pp": Advantage(
        baseline=by_batch,
        scale=None,
        least_group=1,
        formula="(r - mean of the step) / (std of the step + 1e-4)",
        source="REINFORCE++: Hu et al. 2025",
        use="one completion for each of many prompts (`rollout.group_size: 1`); goes with `kl: {place: reward, "
        "estimator: k1}`",
    ),
    "reinforce_pp_baseline": Advantage(
        baseline=by_group_mean_and_batch_std,
        scale=None,
        formula="d = r - mean of the group; d / (std of d in the step + 1e-4)",
        source="REINFORCE++-baseline: Hu et al. 2025",
        use="groups of very different spread; goes with `kl.estimator: k2`",
    ),
    "gdpo": Advantage(
        baseline=each_reward_by_group,
        scale=None,
        depends_on="rewards",
        formula="sum over rewards of weight x `group_norm` of that reward, then normalised over the step",
        source="GDPO: Liu et al. 2026",
        use="several rewards of different spread, so that none hides another",
    ),
    "pass_k": Advantage(
        baseline=by_pass_at_k,
        scale=None,
        depends_on="right",
        needs_pass_k=True,
        formula="P = 1 - C(w, k) / C(G, k), s = sqrt(P (1 - P)); right (1 - P) / s, wrong "
        "(1 - P - C(w-1, k-1) / C(G-1, k-1)) / s, w wrong ones of G",
        source="Pass@k training: Chen et al. 2025",
        use="keeps exploring if one right try of k is enough; needs `pass_k` and a reward that tells right from wrong",
    ),
}

if TYPE_CHECKING:
    AdvantageName = str
    ScaleName = str
else:
    AdvantageName = Literal[tuple(ADVANTAGES)]
    ScaleName = Literal[tuple(SCALES)]


class OwnAdvantage(Section):
    """An advantage of your own (docs/algorithms.md)."""

    call: str
    """file.py:function or package.module:function; it takes a RewardTable and Options, returns a value for each
    completion of the step, and runs in the trainer's process."""
    least_group: PositiveInt = 2
    """A group with fewer scorable completions is dropped; 1 goes with rollout.group_size: 1."""


class AdvantageKeys(Section):
    """Keys of the recipe that choose the advantage."""

    advantage: Annotated[
        Annotated[AdvantageName, Tag(TEXT_FORM)] | Annotated[OwnAdvantage, Tag(SECTION_FORM)], Discriminator(form_of)
    ] = "group_norm"
    """How rewards become advantages; your own by {call: file.py:function}."""
    scale: ScaleName | None = None
    """Deviation that advantages are divided by: of the group's rewards, of the whole step's, or none. null: as the
    advantage was published; none for your own."""
    pass_k: PositiveInt | None = None
    """Tries of which one has to be right, for advantage: pass_k, or for your own."""
    advantage_clip: PositiveFloat | None = None
    """Largest absolute advantage; null is off."""


def advantage_of(chosen: str | OwnAdvantage) -> Advantage:
    """Return the advantage that a recipe chooses. A user's own advantage is loaded when it is first computed."""
    if isinstance(chosen, str):
        return ADVANTAGES[chosen]
    return Advantage(
        baseline=partial(own_advantages, chosen.call),
        scale="none",
        least_group=chosen.least_group,
        depends_on="all",
        formula="your own",
        source=chosen.call,
        use="research",
    )


def advantages(table: RewardTable, chosen: str | OwnAdvantage, options: Options) -> Tensor:
    """Compute the chosen advantage, fp32 (C,), scaled and clipped as requested. Raises TrainingError if a user's own
    advantage fails."""
    advantage = advantage_of(chosen)
    values_C = advantage.baseline(table, options)
    if advantage.scale is not None:
        values_C = SCALES[options.scale or advantage.scale](table, values_C)
    return values_C if options.clip is None else values_C.clamp(-options.clip, options.clip)
