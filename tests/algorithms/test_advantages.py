"""Advantages against numbers worked by hand."""

import math

import pytest
import torch

from tiercel.algorithms import ADVANTAGES, Options, RewardTable, advantages

NAN = math.nan


def table(*groups: list[float], rewards: list[list[float]] | None = None, weights: list[float] | None = None):
    """Return groups by their totals. A completion is right if its total is 1. `rewards` are listed by completion."""
    totals = [total for group in groups for total in group]
    return RewardTable(
        totals_C=torch.tensor(totals),
        group_of_C=torch.tensor([number for number, group in enumerate(groups) for _ in group]),
        rewards_CF=torch.tensor(rewards or [[total] for total in totals]).reshape(len(totals), -1),
        weights_F=torch.tensor(weights or [1.0]),
        is_correct_C=torch.tensor([total == 1 for total in totals]),
    )


def found(name: str, *groups: list[float], **options) -> torch.Tensor:
    return advantages(table(*groups), name, Options(**options))


def test_three_rewards_by_hand():
    # mean 2, squared deviations 1 + 0 + 1 over 2 (ddof 1): standard deviation 1
    expected = torch.tensor([-1 / 1.0001, 0.0, 1 / 1.0001])
    torch.testing.assert_close(found("group_norm", [1.0, 2.0, 3.0]), expected)


def test_one_right_of_four_by_hand():
    # mean 1/4, squared deviations 9/16 + 3 * 1/16 = 3/4 over 3: standard deviation 1/2
    expected = torch.tensor([-0.25, 0.75, -0.25, -0.25]) / 0.5001
    torch.testing.assert_close(found("group_norm", [0.0, 1.0, 0.0, 0.0]), expected)


def test_groups_do_not_touch_each_other():
    expected = torch.cat([found("group_norm", [4.0, 6.0]), found("group_norm", [0.0, 1.0, 0.0, 0.0])])
    torch.testing.assert_close(found("group_norm", [4.0, 6.0], [0.0, 1.0, 0.0, 0.0]), expected)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("reinforce_pp", "pass_k")])
@pytest.mark.parametrize("value", (0.0, 1.0, 0.1, -3.7, 1e-30))
def test_equal_rewards_give_exact_zeros(value, name):
    # a mean of seven 0.1 is not 0.1 in float32
    assert torch.equal(found(name, [value] * 7), torch.zeros(7))


def test_a_tiny_spread_does_not_explode():
    assert float(found("group_norm", [0.5, 0.5 + 1e-6]).abs().max()) < 0.01


def test_the_centred_ones_by_hand():
    # means 1 and 5
    assert found("group_centred", [0.0, 2.0], [4.0, 4.0, 7.0]).tolist() == [-1.0, 1.0, -1.0, -1.0, 2.0]


def test_leave_one_out_by_hand():
    # 3 - mean(1, 2), 1 - mean(2, 3), 2 - mean(1, 3)
    assert found("rloo", [3.0, 1.0, 2.0]).tolist() == [1.5, -1.5, 0.0]


def test_the_scales_by_hand():
    # groups [0, 2] and [4, 8]: centred -1 1 -2 2; standard deviations of the groups sqrt 2 and 2 sqrt 2; of all four,
    # with mean 3.5: (12.25 + 2.25 + 0.25 + 20.25) / 3 = 35 / 3
    groups, centred = ([0.0, 2.0], [4.0, 8.0]), torch.tensor([-1.0, 1.0, -2.0, 2.0])
    deviations = torch.tensor([2**0.5, 2**0.5, 2 * 2**0.5, 2 * 2**0.5])
    torch.testing.assert_close(found("group_centred", *groups, scale="group"), centred / (deviations + 1e-4))
    torch.testing.assert_close(found("group_norm", *groups, scale="batch"), centred / (math.sqrt(35 / 3) + 1e-4))
    assert torch.equal(found("group_norm", *groups, scale="none"), centred)
    torch.testing.assert_close(found("rloo", *groups, scale="batch"), 2 * centred / (math.sqrt(35 / 3) + 1e-4))


def test_the_whole_step_is_the_baseline_of_reinforce_pp():
    # mean 3.5, as above; a group of one is as good as any other
    expected = torch.tensor([-3.5, -1.5, 0.5, 4.5]) / (math.sqrt(35 / 3) + 1e-4)
    torch.testing.assert_close(found("reinforce_pp", [0.0], [2.0], [4.0], [8.0]), expected)


def test_reinforce_pp_with_a_baseline_by_hand():
    # centred -1 1 -2 2, their mean 0, squares 10 over 3
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0]) / (math.sqrt(10 / 3) + 1e-4)
    torch.testing.assert_close(found("reinforce_pp_baseline", [0.0, 2.0], [4.0, 8.0]), expected)


def test_each_reward_is_normalised_by_itself():
    # one group, rewards [0, 10] and [1, 0], weights 1 and 0.5: their sums 0.5 and 10 hide the second reward.
    # Each normalises to -+ 1 / sqrt 2 (d): d (-1 + 0.5) and d (1 - 0.5), which whitens to -+ 1 / sqrt 2 again
    given = table([0.5, 10.0], rewards=[[0.0, 1.0], [10.0, 0.0]], weights=[1.0, 0.5])
    d = 1 / (2**0.5)
    first, second = 10 * d / (10 * d + 1e-4), d / (d + 1e-4)  # what the epsilon leaves of each
    sums = torch.tensor([-d * first + 0.5 * d * second, d * first - 0.5 * d * second])
    torch.testing.assert_close(advantages(given, "gdpo", Options()), sums / (sums.std() + 1e-4))


def test_a_group_of_equal_rewards_has_exact_zeros_beside_another():
    for rewards in ([1.0, 0.0, 0.0], [1.0] + [0.0] * 6, [0.1, 0.2, 0.7]):  # whose mean is rounded
        assert found("gdpo", rewards, [1.0] * 5)[len(rewards) :].tolist() == [0.0] * 5


def test_a_reward_that_does_not_apply_adds_nothing():
    # the second reward applies to the first two completions of three, the third applies to one: no deviation
    given = table([0.0, 1.0, 2.0], rewards=[[0.0, 5.0, NAN], [1.0, 7.0, 3.0], [2.0, NAN, NAN]], weights=[1.0, 1.0, 1.0])
    d = 1 / 2**0.5
    sums = torch.tensor([-1.0 - d, d, 1.0])
    expected = (sums - sums.mean()) / sums.std()
    torch.testing.assert_close(advantages(given, "gdpo", Options()), expected, rtol=1e-3, atol=1e-3)


def test_pass_at_k_by_hand():
    # 4 completions, 1 right, k 2: of 6 pairs, 3 have no right one: P = 1/2, s = 1/2; the right one (1 - 1/2) / (1/2); a
    # wrong one's 3 pairs fail twice: (1 - 1/2 - 2/3) / (1/2) = -1/3
    torch.testing.assert_close(
        found("pass_k", [0.0, 1.0, 0.0, 0.0], pass_k=2), torch.tensor([-1 / 3, 1.0, -1 / 3, -1 / 3])
    )


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", (1, 2, 3, 5))
def test_pass_at_k_equals_a_count_of_all_draws(right, k):
    from itertools import combinations

    size = 6
    is_right = [i < right for i in range(size)]
    draws = [draw for draw in combinations(range(size), k)]
    passed = {draw: any(is_right[i] for i in draw) for draw in draws}
    mean = sum(passed.values()) / len(draws)
    deviation = math.sqrt(mean * (1 - mean))
    expected = []
    for i in range(size):
        mine = [float(passed[draw]) for draw in draws if i in draw]
        expected.append((sum(mine) / len(mine) - mean) / deviation if deviation else 0.0)
    torch.testing.assert_close(
        found("pass_k", [float(right) for right in is_right], pass_k=k), torch.tensor(expected), atol=1e-6, rtol=1e-5
    )


def test_the_clip_bounds_both_sides():
    assert found("group_centred", [0.0, 0.0, 9.0], clip=2.0).tolist() == [-2.0, -2.0, 2.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_completions_at_all_are_no_advantages(name):
    empty = RewardTable(
        totals_C=torch.empty(0),
        group_of_C=torch.empty(0, dtype=torch.int64),
        rewards_CF=torch.empty(0, 1),
        weights_F=torch.ones(1),
        is_correct_C=torch.empty(0, dtype=torch.bool),
    )
    assert advantages(empty, name, Options(pass_k=2)).shape == (0,)
