"""Compute metrics of scored groups: failures, accuracy, means and spreads. Pure functions."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.errors import TrainingError
from tiercel.types import ScoredCompletion, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureStats:
    """How many completions have a failed reward. The statistics of several ranks can be added."""

    completions: int
    failed: int
    first_failure: str | None

    def __add__(self, other: "FailureStats") -> "FailureStats":
        return FailureStats(
            completions=self.completions + other.completions,
            failed=self.failed + other.failed,
            first_failure=other.first_failure if self.first_failure is None else self.first_failure,
        )

    @property
    def fraction(self) -> float:
        """Return the share of the completions that have a failed reward; 0 if there are none."""
        return self.failed / self.completions if self.completions else 0.0

    def require_at_most(self, max_fraction: float) -> None:
        """Raise TrainingError with the first failure if more than `max_fraction` of the completions failed."""
        if self.fraction <= max_fraction:
            return
        raise TrainingError(
            f"a reward failed on {self.failed} of {self.completions} completions, more than "
            f"reliability.max_failed_reward_fraction = {max_fraction:g} allows. Fix the reward or the rows it reads, "
            f"or raise the limit. The first failure:\n{self.first_failure}"
        )


NO_FAILURES = FailureStats(completions=0, failed=0, first_failure=None)


def count_failures(scored: Sequence[ScoredGroup]) -> FailureStats:
    """Count the failures over all completions of the groups."""
    first_failures = [_first_failure(completion) for group in scored for completion in group.completions]
    failures = [failure for failure in first_failures if failure is not None]
    return FailureStats(
        completions=len(first_failures), failed=len(failures), first_failure=failures[0] if failures else None
    )


def _first_failure(completion: ScoredCompletion) -> str | None:
    failures = (value.failure for value in completion.rewards.values() if value.failure is not None)
    return next(failures, completion.completion.failure)  # distillation may have no rewards


def reward_statistics(scored: Sequence[ScoredGroup], least_group: int = 2) -> dict[str, float]:
    """Compute the metrics of the reward stage; a key whose number is not defined is left out.

    reward/mean, reward/std             of the weighted sums of all unmasked completions; std is the population's
    reward/NAME/mean                    over the completions that the reward applies to
    reward/failed_fraction              share of the completions with a failed reward
    reward/masked                       completions without a weighted sum
    group/zero_std_fraction             share with equal sums, among groups of 2 or more unmasked completions
    group/dropped                       groups with fewer than `least_group` unmasked completions
    """
    completions = [completion for group in scored for completion in group.completions]
    metrics: dict[str, float] = {}
    totals = [completion.total for completion in completions if completion.total is not None]
    if totals:
        metrics["reward/mean"] = statistics.fmean(totals)
        metrics["reward/std"] = statistics.pstdev(totals)
    for name in dict.fromkeys(name for completion in completions for name in completion.rewards):
        values = [completion.rewards[name].value for completion in completions if name in completion.rewards]
        applicable = [value for value in values if value is not None]
        if applicable:
            metrics[f"reward/{name}/mean"] = statistics.fmean(applicable)
    metrics["reward/failed_fraction"] = count_failures(scored).fraction
    metrics["reward/masked"] = len(completions) - len(totals)
    by_group = [[each.total for each in group.completions if each.total is not None] for group in scored]
    usable = [group for group in by_group if len(group) >= 2]
    if usable:
        metrics["group/zero_std_fraction"] = sum(min(group) == max(group) for group in usable) / len(usable)
    metrics["group/dropped"] = sum(len(group) < least_group for group in by_group)
    return metrics
