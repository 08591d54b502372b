"""Losses of pairs and of labels: values worked by hand, and formulas written out in float64."""

import math

import pytest
import torch

from tiercel.algorithms.pair_section import Dpo, Kto
from tiercel.algorithms.pairs import PAIR_LOSSES, PairInput, kto_losses, log1mexp, ranking_losses

LN2, LN3 = math.log(2), math.log(3)


def pairs(policy, reference=None, lengths=(2.0, 4.0), shift=0.0):
    """One pair: sums of logprobs of the chosen and the rejected answer."""
    return PairInput(
        logprobs_B2=torch.tensor([policy]),
        reference_B2=None if reference is None else torch.tensor([reference]),
        lengths_B2=torch.tensor([lengths]),
        shift=shift,
    )


# Policy (-1, -5), reference (-2, -4): log ratios 1 and -1. With beta ln 3 / 2 the margin is ln 3, and s(ln 3) = 3/4.
@pytest.mark.parametrize(
    ("keys", "expected"),
    (
        ({"loss": "sigmoid"}, math.log(4 / 3)),
        ({"loss": "sigmoid", "label_smoothing": 0.25}, 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        # Means over 2 and 4 tokens: 1/2 and -1/4, margin 3/4 beta.
        ({"loss": "sigmoid", "length_normalised": True, "beta": LN3 / 0.75}, math.log(4 / 3)),
        ({"loss": "ipo", "beta": 2.0}, (0.75 - 0.25) ** 2),
        ({"loss": "hinge", "beta": 0.25}, 0.5),
        ({"loss": "hinge", "beta": 2.0}, 0.0),
        ({"loss": "robust"}, math.log(4 / 3)),
        ({"loss": "robust", "label_smoothing": 0.25}, (0.75 * math.log(4 / 3) - 0.25 * math.log(4)) / 0.5),
        # Rewards ln 3 / 2 and -ln 3 / 2 without a shift: -log s(ln 3 / 2) for both.
        ({"loss": "mpo"}, 0.8 * math.log(4 / 3) + 0.2 * 2 * math.log(1 + 3**-0.5)),
    ),
)
def test_losses_with_a_reference(keys, expected):
    dpo = Dpo(**{"beta": LN3 / 2, **keys})
    (loss,) = PAIR_LOSSES[dpo.loss].compute(pairs((-1.0, -5.0), (-2.0, -4.0)), dpo)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "policy", "lengths", "expected"),
    (
        ({"loss": "cpo", "beta": LN3 / 4}, (-1.0, -5.0), (1.0, 1.0), math.log(4 / 3)),
        # Means -1 and -2; beta 1 less the margin 1 leaves 0.
        ({"loss": "simpo", "beta": 1.0, "gamma": 1.0}, (-2.0, -8.0), (2.0, 4.0), LN2),
        ({"loss": "simpo", "beta": 0.5}, (-2.0, -8.0), (2.0, 4.0), LN2),  # gamma is 0.5
        # Probabilities 1/2 and 1/4 have the odds 1 and 1/3: their log differs by ln 3.
        ({"loss": "orpo", "beta": 2.0}, (-2 * LN2, -8 * LN2), (2.0, 4.0), 2 * math.log(4 / 3)),
    ),
)
def test_losses_without_a_reference(keys, policy, lengths, expected):
    dpo = Dpo(**keys)
    (loss,) = PAIR_LOSSES[dpo.loss].compute(pairs(policy, lengths=lengths), dpo)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_the_shift_moves_both_answers_of_bco():
    dpo = Dpo(loss="mpo", beta=1.0)
    moved, still = (pairs((-1.0, -5.0), (-2.0, -4.0), shift=shift) for shift in (1.0, 0.0))
    # Rewards 1 and -1: less 1 they are 0 and -2.
    expected = LN2 + math.log1p(math.exp(-2)) - 2 * math.log1p(math.exp(-1))
    (difference,) = PAIR_LOSSES["mpo"].compute(moved, dpo) - PAIR_LOSSES["mpo"].compute(still, dpo)
    assert float(difference) == pytest.approx(0.2 * expected, abs=1e-6)


def written_out(loss, w, v, rw, rv, n, m, beta, e, gamma, shift):
    """Each loss as its paper has it, in float64."""

    def s(x):
        return 1 / (1 + torch.exp(-x))

    margin = beta * ((w - rw) - (v - rv))
    odds = [torch.exp(a) / (1 - torch.exp(a)) for a in (w / n, v / m)]
    sigmoid = -(1 - e) * torch.log(s(margin)) - e * torch.log(s(-margin))
    bco = -torch.log(s(beta * (w - rw) - shift)) - torch.log(s(shift - beta * (v - rv)))
    return {
        "sigmoid": sigmoid,
        "ipo": ((w - rw) / n - (v - rv) / m - 1 / (2 * beta)) ** 2,
        "hinge": torch.clamp(1 - margin, min=0),
        "robust": (-(1 - e) * torch.log(s(margin)) + e * torch.log(s(-margin))) / (1 - 2 * e),
        "mpo": 0.8 * sigmoid + 0.2 * bco,
        "orpo": -beta * torch.log(s(torch.log(odds[0] / odds[1]))),
        "simpo": -(1 - e) * torch.log(s(beta * (w / n - v / m) - gamma))
        - e * torch.log(s(-(beta * (w / n - v / m) - gamma))),
        "cpo": -(1 - e) * torch.log(s(beta * (w - v))) - e * torch.log(s(-beta * (w - v))),
    }[loss]


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_values_and_gradients_are_those_of_the_formulas(loss):
    generator = torch.Generator().manual_seed(5)
    lengths_B2 = torch.randint(1, 60, (40, 2), generator=generator).double()
    policy_B2 = (-lengths_B2 * torch.rand(40, 2, generator=generator).double() * 2).requires_grad_()
    reference_B2 = -lengths_B2 * torch.rand(40, 2, generator=generator).double() * 2
    smoothing = 0.1 if loss in ("sigmoid", "robust", "mpo", "simpo", "cpo") else 0.0
    dpo = Dpo(loss=loss, beta=0.3, label_smoothing=smoothing, gamma=0.7 if loss == "simpo" else None)
    given = PairInput(
        logprobs_B2=policy_B2.float(),
        reference_B2=reference_B2.float() if dpo.has_reference else None,
        lengths_B2=lengths_B2.float(),
        shift=0.4,
    )
    found_B = PAIR_LOSSES[loss].compute(given, dpo)
    columns = [tensor[:, place] for tensor in (policy_B2, reference_B2, lengths_B2) for place in (0, 1)]
    expected_B = written_out(loss, *columns, 0.3, smoothing, 0.7, 0.4)
    assert torch.allclose(found_B.double(), expected_B, rtol=1e-4, atol=1e-5)
    (found,) = torch.autograd.grad(found_B.sum(), policy_B2)
    (expected,) = torch.autograd.grad(expected_B.sum(), policy_B2)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_orpos_rewards_are_of_means_as_its_loss_is():
    pairs = PairInput(
        logprobs_B2=torch.tensor([[-50.0, -20.0]]),
        reference_B2=None,
        lengths_B2=torch.tensor([[100.0, 10.0]]),
        shift=0.0,
    )
    assert pairs.rewards_B2(Dpo(loss="orpo", beta=0.1)).tolist() == [[pytest.approx(-0.05), pytest.approx(-0.2)]]


def test_the_first_step_of_dpo_has_a_gradient():
    policy_B2 = torch.tensor([[-3.0, -3.0]], requires_grad=True)
    given = PairInput(logprobs_B2=policy_B2, reference_B2=policy_B2.detach(), lengths_B2=torch.ones(1, 2), shift=0.0)
    PAIR_LOSSES["sigmoid"].compute(given, Dpo(loss="sigmoid", beta=0.1)).sum().backward()
    assert policy_B2.grad.tolist() == [[pytest.approx(-0.05), pytest.approx(0.05)]]


def test_kto_weighs_labels_against_the_divergence():
    # Rewards ln 3 above and below the divergence: 1 - s(ln 3) = 1/4, 1 - s(-ln 3) = 3/4.
    kto = Kto(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    rewards_B = torch.tensor([LN3 + 1, LN3 + 1, 1 - LN3, 1 - LN3])
    losses_B = kto_losses(rewards_B, torch.tensor([True, False, True, False]), 2.0, kto)
    assert losses_B.tolist() == pytest.approx([2 / 4, 3 * 3 / 4, 2 * 3 / 4, 3 / 4])


def test_log1mexp_near_0_and_far_from_it():
    values = torch.tensor([-1e-3, -0.5, -LN2, -5.0, -80.0], dtype=torch.float64)
    assert torch.allclose(log1mexp(values), torch.log(-torch.expm1(values)), rtol=1e-12)
    assert bool(log1mexp(torch.tensor([0.0, 1e-9])).isfinite().all())


@pytest.mark.parametrize(
    ("values", "margin", "centre", "expected"),
    (
        ((0.0, 0.0), 0.0, 0.0, LN2),
        ((LN3, 0.0), 0.0, 0.0, math.log(4 / 3)),
        ((LN3 + 1, 0.0), 1.0, 0.0, math.log(4 / 3)),
        ((0.0, LN3), 0.0, 0.0, math.log(4)),
        ((LN3, 0.0), 0.0, 0.5, math.log(4 / 3) + 0.5 * LN3**2),
        ((2.0, -2.0), 4.0, 0.5, LN2),
    ),
)
def test_values_of_a_pair(values, margin, centre, expected):
    (loss,) = ranking_losses(torch.tensor([values]), torch.tensor([margin]), centre)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_values_is_written_out_in_float64():
    values = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    margins = torch.rand(9, dtype=torch.float64)
    ranking_losses(values, margins, 0.1).sum().backward()
    with torch.no_grad():
        right = 1 / (1 + torch.exp(-(values[:, 0] - values[:, 1] - margins)))
        both = 0.2 * values.sum(1)
        expected = torch.stack([right - 1 + both, 1 - right + both], 1)
    assert torch.allclose(values.grad, expected, atol=1e-12)
