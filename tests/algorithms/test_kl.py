"""The k3 estimator against numbers worked by hand."""

import math

import torch

from tiercel.algorithms import KL_ESTIMATORS
from tiercel.algorithms.kl import k3


def test_by_hand():
    # policy 1/2, reference 1/4: 1/2 - ln(1/2) - 1; policy 1/4, reference 1/2: 2 - ln 2 - 1
    policy = torch.tensor([0.5, 0.25, 0.3]).log()
    reference = torch.tensor([0.25, 0.5, 0.3]).log()
    expected = torch.tensor([math.log(2) - 0.5, 1 - math.log(2), 0.0])
    torch.testing.assert_close(k3(policy, reference), expected)


def test_gradient_by_hand():
    # d/dp of exp(q - p) - (q - p) - 1 is 1 - exp(q - p)
    policy = torch.tensor([0.5, 0.25]).log().requires_grad_()
    k3(policy, torch.tensor([0.25, 0.5]).log()).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([0.5, -1.0]))


def test_never_negative():
    generator = torch.Generator().manual_seed(0)
    policy, reference = -5 * torch.rand(2, 10_000, generator=generator, dtype=torch.float64)
    assert bool((k3(policy, reference) >= 0).all())


def test_unbiased():
    # the mean under the policy is sum p (q/p - ln(q/p) - 1) = KL(p || q), exactly
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * k3(policy.log(), reference.log())).sum(), expected)


def test_the_recipes_name_chooses_it():
    assert KL_ESTIMATORS["k3"] is k3
