"""What metrics.jsonl and the log say about groups that fork."""

import logging
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tiercel.log import logger
from tiercel.types import Completion, ScoredGroup

Part = tuple[int, ...]  # the tokens of a completion up to the end of a part


def branch_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Summarise the forks of a step; empty without. `tokens/drawn` counts the sampled tokens of a shared part once,
    `tokens/completion` for each completion. `branches/between_fraction` is the share of the variance of rewards within
    groups that first parts explain; it is absent if no rewards differ."""
    completions = [each.completion for group in scored for each in group.completions]
    if not any(each.forks for each in completions):
        return {}
    between, whole = (sum(column) for column in zip(*map(_squares, scored), strict=True))
    return {
        "branches/reached_fraction": statistics.fmean(map(has_forked, completions)),
        "tokens/drawn": sum(sum(dict(_parts_of(group)).values()) for group in scored),
        **({"branches/between_fraction": between / whole} if whole else {}),
    }


def has_forked(completion: Completion) -> bool:
    """Return whether a completion goes on after each fork."""
    return all(fork < len(completion.token_ids_L) for fork in completion.forks)


def tell_of_unreached(scored: Sequence[ScoredGroup], branch_at: str | None, step: int) -> None:
    """Log how many completions could not fork, because a part ended before the place of its fork: a warning if none
    forked, otherwise only in log.txt."""
    forked = [has_forked(each.completion) for group in scored for each in group.completions if each.completion.forks]
    if missing := forked.count(False):
        place = "first turn ended the trajectory" if branch_at is None else f"first part has no {branch_at!r}"
        logger.log(
            logging.DEBUG if any(forked) else logging.WARNING,
            f"step {step + 1}: {missing} of {len(forked)} completions did not fork, because their {place}; each such "
            "part stands for all of its continuations",
        )


def _parts_of(group: ScoredGroup) -> Iterator[tuple[tuple[int, Part], int]]:
    """Yield the parts of each completion, each with its place, and the number of its sampled tokens."""
    for each in group.group.completions:
        ids = tuple(each.token_ids_L.tolist())
        for start, stop in pairwise((0, *each.forks, len(ids))):
            yield (start, ids[:stop]), int(each.is_sampled_L[start:stop].sum())


def _squares(group: ScoredGroup) -> tuple[float, float]:
    """Return the sum of squares of a group's rewards that their first parts explain, and the whole of it."""
    totals: dict[Part, list[float]] = {}
    for each in group.completions:
        if each.total is not None and each.completion.forks:
            totals.setdefault(tuple(each.completion.token_ids_L[: each.completion.forks[0]].tolist()), []).append(
                each.total
            )
    every = [value for values in totals.values() for value in values]
    if not every:
        return 0.0, 0.0
    mean = statistics.fmean(every)
    between = sum(len(values) * (statistics.fmean(values) - mean) ** 2 for values in totals.values())
    return between, sum((value - mean) ** 2 for value in every)
