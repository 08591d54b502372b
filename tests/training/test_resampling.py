"""Which groups are good enough to learn from, depending on what the advantage reads."""

from dataclasses import replace

import pytest

from tests.algorithms.test_advantages import found
from tests.rewards.samples import scored, scored_group
from tiercel.algorithms.section import Algorithm
from tiercel.reward_types import RewardValue
from tiercel.training.grpo.rollouts import has_variance, teaches


def group(*completions: tuple[float | None, bool, float]):
    """Completions by total, right or wrong, and the value of one reward."""
    return scored_group(*(scored(total, right, mine=RewardValue(value=value)) for total, right, value in completions))


@pytest.mark.parametrize(
    ("other", "good_for"),
    (
        ((1.0, True, 0.5), set()),
        ((2.0, True, 0.5), {"totals", "all"}),
        ((1.0, False, 0.5), {"right", "all"}),
        ((1.0, True, 0.7), {"rewards", "all"}),
        ((None, False, 0.7), set()),  # it has no total, so it is not learnt from
    ),
)
def test_a_group_differs_in_what_the_advantage_looks_at(other, good_for):
    pair = group((1.0, True, 0.5), other)
    assert {name for name in ("totals", "right", "rewards", "all") if has_variance(pair, name, [1.0])} == good_for
    assert not has_variance(pair, "rewards", [0.0])


@pytest.mark.parametrize("overlong", ("keep", "mask"))
def test_a_group_that_is_truncated_throughout_teaches_nothing_if_that_is_masked(overlong):
    pair = group((1.0, True, 0.5), (0.0, False, 0.5))
    cut = [replace(each, completion=replace(each.completion, is_truncated=True)) for each in pair.completions]
    algorithm = Algorithm(overlong=overlong)
    assert teaches(replace(pair, completions=tuple(cut)), algorithm, [1.0]) == (overlong == "keep")
    assert teaches(replace(pair, completions=(pair.completions[0], cut[1])), algorithm, [1.0])


@pytest.mark.parametrize(("right", "is_good"), ((0, False), (1, True), (2, True), (3, False), (4, False)))
def test_with_pass_k_a_group_needs_k_wrong_completions(right, is_good):
    four = group(*((float(number < right), number < right, 0.0) for number in range(4)))
    algorithm = Algorithm(advantage="pass_k", pass_k=2)
    assert teaches(four, algorithm, [1.0]) == is_good
    assert bool(found("pass_k", [1.0] * right + [0.0] * (4 - right), pass_k=2).any()) == is_good
