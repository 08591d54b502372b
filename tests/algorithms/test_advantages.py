"""Group-relative advantages against numbers worked by hand."""

import pytest
import torch

from tiercel.algorithms import ADVANTAGES
from tiercel.algorithms.advantages import group_norm


def test_three_rewards_by_hand():
    # mean 2, squared deviations 1 + 0 + 1 over 2 (ddof 1): standard deviation 1
    advantages = group_norm(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(advantages, torch.tensor([-1 / 1.0001, 0.0, 1 / 1.0001]))


def test_one_right_of_four_by_hand():
    # mean 1/4, squared deviations 9/16 + 3 * 1/16 = 3/4 over 3: standard deviation 1/2
    advantages = group_norm(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(advantages, torch.tensor([-0.25, 0.75, -0.25, -0.25]) / 0.5001)


def test_two_rewards_are_one_over_root_two():
    # mean 5, squared deviations 1 + 1 over 1: standard deviation root 2, whatever the rewards
    advantages = group_norm(torch.tensor([4.0, 6.0]))
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-4))


@pytest.mark.parametrize("value", (0.0, 1.0, 0.1, -3.7, 1e-30))
def test_equal_rewards_give_exact_zeros(value):
    advantages = group_norm(torch.full((7,), value))  # a mean of seven 0.1 is not 0.1 in float32
    assert torch.equal(advantages, torch.zeros(7))


def test_a_tiny_spread_does_not_explode():
    advantages = group_norm(torch.tensor([0.5, 0.5 + 1e-6]))
    assert float(advantages.abs().max()) < 0.01


def test_advantages_sum_to_zero():
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(0))
    assert abs(float(group_norm(rewards).sum())) < 1e-5


@pytest.mark.parametrize("count", (0, 1))
def test_fewer_than_two_rewards_are_refused(count):
    with pytest.raises(ValueError, match="at least two rewards"):
        group_norm(torch.ones(count))


def test_the_recipes_name_chooses_it():
    assert ADVANTAGES["group_norm"] is group_norm
