"""Divergences from a teacher, with numbers worked by hand. p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2)."""

import math

import pytest
import torch

from tiercel.algorithms.teacher import DIVERGENCES

LN2 = math.log(2)
POLICY = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()


@pytest.mark.parametrize("name", ("reverse_kl", "forward_kl"))
def test_divergences_of_two_distributions_that_mirror_each_other(name):
    # sum p (ln p - ln q) = 1/2 ln 2 + 0 - 1/4 ln 2
    assert float(DIVERGENCES[name].of(POLICY, TEACHER, 0.5)) == pytest.approx(LN2 / 4)


def test_reverse_and_forward_are_told_apart():
    half, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    reverse = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    forward = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(DIVERGENCES["reverse_kl"].of(half, sure, 0.5)) == pytest.approx(reverse)
    assert float(DIVERGENCES["forward_kl"].of(half, sure, 0.5)) == pytest.approx(forward)


def test_jensen_shannon_by_its_mixture():
    # m = (3/8, 1/4, 3/8): KL(p || m) = 1/2 ln 4/3 + 1/4 ln 2/3, and KL(q || m) is the same
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert float(DIVERGENCES["jsd"].of(POLICY, TEACHER, 0.5)) == pytest.approx(expected)
    # mix = 1/4: m = (7/16, 1/4, 5/16)
    of_teacher = 0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5)
    of_policy = 0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)
    found = float(DIVERGENCES["jsd"].of(POLICY, TEACHER, 0.25))
    assert found == pytest.approx(0.25 * of_teacher + 0.75 * of_policy)


def test_nothing_is_between_equal_distributions():
    for divergence in DIVERGENCES.values():
        if divergence.of is not None:
            assert float(divergence.of(POLICY, POLICY, 0.3)) == pytest.approx(0.0, abs=1e-15)
