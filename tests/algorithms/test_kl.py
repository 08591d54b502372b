"""Estimators of the divergence against numbers worked by hand."""

import math

import pytest
import torch

from tiercel.algorithms.kl import Kl, k1, k2, k3, penalty_of


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


def test_the_others_by_hand():
    policy, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(k1(policy, reference), torch.tensor([math.log(2), -math.log(2)]))
    torch.testing.assert_close(k2(policy, reference), torch.full((2,), math.log(2) ** 2 / 2))


def test_k1_is_unbiased_and_its_gradient_averages_to_nothing():
    logits, reference = torch.tensor([1.0, 0.2, -0.5], requires_grad=True), torch.tensor([0.3, 0.3, 0.4])
    policy = logits.log_softmax(0)
    estimates = k1(policy, reference.log())
    torch.testing.assert_close((policy.exp().detach() * estimates).sum(), (policy.exp() * estimates).sum())
    (policy.exp().detach() * estimates).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3), atol=1e-7, rtol=0)


def test_the_gradient_of_k2_averages_to_that_of_the_divergence():
    logits, reference = torch.tensor([1.0, 0.2, -0.5], requires_grad=True), torch.tensor([0.3, 0.3, 0.4])
    policy = logits.log_softmax(0)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference.log())).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((policy.exp().detach() * k2(policy, reference.log())).sum(), logits)
    torch.testing.assert_close(found, true)


def test_a_coefficient_of_zero_makes_no_term():
    assert penalty_of(Kl()) is None
    assert penalty_of(Kl(coef=0.0, place="reward", estimator="k1")) is None


@pytest.mark.parametrize(("place", "in_loss"), [("loss", True), ("reward", False)])
def test_a_term_is_in_the_loss_or_in_the_reward(place, in_loss):
    term = penalty_of(Kl(coef=0.04, place=place))
    assert term is not None and term.coef == 0.04
    assert term.in_loss is in_loss and term.in_reward is not in_loss


def test_a_term_estimates_by_its_estimator_with_gradient_and_without_its_coefficient():
    policy = torch.tensor([0.5, 0.25]).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5]).log()
    for name, expected in (("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)):
        term = Kl(coef=0.5, place="loss", estimator=name)
        assert term.estimate(policy, reference)[0].item() == pytest.approx(expected)
    Kl(coef=0.5, place="loss", estimator="k3").estimate(policy, reference).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([0.5, -1.0]))


def test_times_the_ratio_the_gradient_of_k3_averages_to_that_of_the_divergence_off_policy_too():
    logits, reference = torch.tensor([1.0, 0.2, -0.5], requires_grad=True), torch.tensor([0.3, 0.3, 0.4])
    old = torch.tensor([0.5, 0.3, 0.2])
    policy = logits.log_softmax(0)
    (true,) = torch.autograd.grad((policy.exp() * (policy - reference.log())).sum(), logits, retain_graph=True)
    by_ratio, plain = (Kl(coef=0.1, by_ratio=given) for given in (True, False))
    (found,) = torch.autograd.grad(
        (old * by_ratio.term(policy, reference.log(), old.log())).sum(), logits, retain_graph=True
    )
    torch.testing.assert_close(found, true)
    assert torch.equal(plain.term(policy, reference.log(), old.log()), plain.estimate(policy, reference.log()))


def test_the_ratio_of_the_penalty_by_hand():
    # policy 1/2, reference 1/4, old 1/4: ratio 2 times ln 2 - 1/2; gradient 2 (ln 2 - 1/2) + 2 (1 - 1/2)
    policy = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    quarter = torch.tensor([0.25], dtype=torch.float64).log()
    term = Kl(coef=0.1, by_ratio=True).term(policy, quarter, quarter)
    term.sum().backward()
    assert float(term.detach()) == pytest.approx(2 * math.log(2) - 1)
    assert float(policy.grad) == pytest.approx(2 * math.log(2))


def test_a_moving_reference_follows_after_every_so_many_steps():
    moving, staying = Kl(coef=0.1, sync_every=3, sync_mix=0.5), Kl(coef=0.1)
    assert [step for step in range(1, 8) if moving.moves_reference_after(step)] == [3, 6] and moving.sync_mix == 0.5
    assert not any(staying.moves_reference_after(step) for step in range(1, 8))
