"""Advantages of completions from their rewards.

C scorable completions of a step over all ranks, in the global order of their prompts; F rewards of the recipe;
G completions of one prompt. Groups are runs of equal numbers in `group_of_C`. A group whose rewards are all equal
gets exact zeros, wherever its own mean is the baseline.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTable:
    """The rewards of a step."""

    totals_C: Tensor  # fp32, weighted sums
    group_of_C: Tensor  # int64, ascending
    rewards_CF: Tensor  # fp32, each reward by itself; NaN where it does not apply
    weights_F: Tensor  # fp32
    is_correct_C: Tensor  # bool

    def groups(self) -> list[slice]:
        """Each group's run of completions."""
        _, sizes = torch.unique_consecutive(self.group_of_C, return_counts=True)
        ends = sizes.cumsum(0).tolist()
        return [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a recipe may choose beside the advantage's name."""

    scale: str | None = None  # one of SCALES; None: the advantage's own
    pass_k: int | None = None
    clip: float | None = None  # largest absolute value


def centred(values_G: Tensor) -> Tensor:
    """r - mean; exact zeros where all are equal."""
    return torch.zeros_like(values_G) if _all_equal(values_G) else values_G - values_G.mean()


def by_group_mean(table: RewardTable, options: Options) -> Tensor:
    """r - mean of the group."""
    return _by_group(table, centred)


def by_others_mean(table: RewardTable, options: Options) -> Tensor:
    """r - mean of the group's other completions = (r - mean) G / (G - 1)."""
    return _by_group(table, lambda rewards_G: centred(rewards_G) * (len(rewards_G) / max(1, len(rewards_G) - 1)))


def by_batch(table: RewardTable, options: Options) -> Tensor:
    """(r - mean) / std over all completions of the step."""
    return whitened(table.totals_C)


def by_group_mean_and_batch_std(table: RewardTable, options: Options) -> Tensor:
    """r - mean of the group, over the standard deviation of that difference in the whole step."""
    centred_C = by_group_mean(table, options)
    return centred_C / (_std(centred_C) + EPSILON)


def each_reward_by_group(table: RewardTable, options: Options) -> Tensor:
    """Every reward normalised in its group by itself, their weighted sum normalised over the step. A reward that does
    not apply to a completion adds nothing to it."""
    sums_C = torch.zeros_like(table.totals_C)
    for rewards_C, weight in zip(table.rewards_CF.unbind(1), table.weights_F, strict=True):
        for run in table.groups():
            applies_G = ~rewards_C[run].isnan()
            applying = rewards_C[run][applies_G]
            if len(applying) > 1:
                sums_C[run][applies_G] += weight * centred(applying) / (_std(applying) + EPSILON)
    return whitened(sums_C)


def by_pass_at_k(table: RewardTable, options: Options) -> Tensor:
    """Of a group with w wrong ones of G, all draws of k counted: a draw passes where one of its k is right.

    P = 1 - C(w, k) / C(G, k), s = sqrt(P (1 - P)); a right one gets (1 - P) / s, a wrong one
    (1 - P - C(w - 1, k - 1) / C(G - 1, k - 1)) / s; exact zeros where s is 0.
    """
    assert options.pass_k is not None
    advantages_C = torch.zeros_like(table.totals_C)
    for run in table.groups():
        is_correct_G = table.is_correct_C[run]
        size, wrong = len(is_correct_G), int((~is_correct_G).sum())
        k = min(options.pass_k, size)
        passes = 1 - math.comb(wrong, k) / math.comb(size, k)
        deviation = math.sqrt(passes * (1 - passes))
        if deviation > 0:
            fails_with_it = math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1)
            right, mistaken = (1 - passes) / deviation, (1 - passes - fails_with_it) / deviation
            advantages_C[run] = torch.where(is_correct_G, right, mistaken)
    return advantages_C


def whitened(values_C: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-4); exact zeros where all are equal."""
    return centred(values_C) / (_std(values_C) + EPSILON)


def scale_by_group(table: RewardTable, values_C: Tensor) -> Tensor:
    """Over the standard deviation (ddof 1) of the group's rewards + 1e-4."""
    scaled = [values_C[run] / (_std(table.totals_C[run]) + EPSILON) for run in table.groups()]
    return torch.cat(scaled) if scaled else values_C


def scale_by_batch(table: RewardTable, values_C: Tensor) -> Tensor:
    """Over the standard deviation (ddof 1) of all rewards of the step + 1e-4."""
    return values_C / (_std(table.totals_C) + EPSILON)


def unscaled(table: RewardTable, values_C: Tensor) -> Tensor:
    return values_C


def _by_group(table: RewardTable, baseline: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [baseline(table.totals_C[run]) for run in table.groups()]
    return torch.cat(parts) if parts else torch.zeros_like(table.totals_C)


def _all_equal(values: Tensor) -> bool:
    return bool((values == values[:1]).all())


def _std(values: Tensor) -> Tensor:
    """ddof 1; 0 of fewer than two values."""
    return values.std(unbiased=True) if len(values) > 1 else values.new_zeros(())


def advantages(table: RewardTable, name: str, options: Options) -> Tensor:
    """fp32 (C,): the named advantage, scaled and cut as asked."""
    chosen = ADVANTAGES[name]
    values_C = chosen.baseline(table, options)
    if chosen.scale is not None:
        values_C = SCALES[options.scale or chosen.scale](table, values_C)
    return values_C if options.clip is None else values_C.clamp(-options.clip, options.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """An advantage of the catalogue."""

    baseline: Callable[[RewardTable, Options], Tensor]
    scale: str | None  # of SCALES, where the recipe names none; None: it takes no scale
    least_group: int = 2  # a group with fewer scorable completions is dropped
    formula: str
    source: str
    use: str


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
        formula="sum over rewards of weight x `group_norm` of that reward, then normalised over the step",
        source="GDPO: Liu et al. 2026",
        use="several rewards of different spread, so that none hides another",
    ),
    "pass_k": Advantage(
        baseline=by_pass_at_k,
        scale=None,
        formula="P = 1 - C(w, k) / C(G, k), s = sqrt(P (1 - P)); right (1 - P) / s, wrong "
        "(1 - P - C(w-1, k-1) / C(G-1, k-1)) / s, w wrong ones of G",
        source="Pass@k training: Chen et al. 2025",
        use="keeps exploring where one of k tries need be right; needs `pass_k` and a reward that tells right from "
        "wrong",
    ),
}
