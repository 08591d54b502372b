"""Losses of pairs and of labels: values worked by hand, and formulas written out in float64."""

import math
from dataclasses import replace

import pytest
import torch

from tiercel.algorithms.f_divergences import F_DIVERGENCES
from tiercel.algorithms.preference import (
    PAIR_LOSSES,
    PairInput,
    kto_losses,
    log1mexp,
    matched,
    ranking_losses,
    wpo_weights,
)
from tiercel.algorithms.preference_sections import SMOOTHED, Dpo, Kto

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
        # s(m) = 3/4 matches labels of which a quarter is wrong: no divergence.
        ({"loss": "exo_pair", "label_smoothing": 0.25}, 0.0),
        ({"loss": "exo_pair", "label_smoothing": 0.1}, 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)),
        # Rewards ln 3 / 2 and its negative: -log s = log(1 + 1 / sqrt 3), and log(1 + sqrt 3) for the other sign.
        ({"loss": "nca_pair"}, 1.5 * math.log(1 + 3**-0.5) + 0.5 * math.log(1 + 3**0.5)),
        ({"loss": "bco_pair"}, 2 * math.log(1 + 3**-0.5)),
        ({"loss": "sppo_hard", "beta": 0.5}, 0.0),
        ({"loss": "sppo_hard", "beta": 1.0}, 0.5),
        ({"loss": "apo_zero"}, 2 / (1 + 3**0.5)),
        ({"loss": "apo_down"}, 3**0.5 / (1 + 3**0.5) + 1 / 4),
        ({"loss": "discopop", "tau": 1.0}, math.log(4 / 3) / 4 + 3 / 4 / 3),
        ({"loss": "discopop"}, 1 / 3),
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
        # Means -1 and -2; beta 1 minus the margin 1 leaves 0.
        ({"loss": "simpo", "beta": 1.0, "gamma": 1.0}, (-2.0, -8.0), (2.0, 4.0), LN2),
        ({"loss": "simpo", "beta": 0.5}, (-2.0, -8.0), (2.0, 4.0), LN2),  # gamma is 0.5
        ({"loss": "cpo_ipo", "beta": 0.5}, (-2.0, -8.0), (2.0, 4.0), 0.0),
        ({"loss": "cpo_ipo", "beta": 1.0}, (-2.0, -8.0), (2.0, 4.0), 0.25),
        ({"loss": "cpo_hinge", "beta": 0.125}, (-1.0, -5.0), (2.0, 4.0), 0.5),
        # Probabilities 1/2 and 1/4 have the odds 1 and 1/3, whose logs differ by ln 3.
        ({"loss": "orpo", "beta": 2.0}, (-2 * LN2, -8 * LN2), (2.0, 4.0), 2 * math.log(4 / 3)),
    ),
)
def test_losses_without_a_reference(keys, policy, lengths, expected):
    dpo = Dpo(**keys)
    (loss,) = PAIR_LOSSES[dpo.loss].compute(pairs(policy, lengths=lengths), dpo)
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("loss", "share"), (("mpo", 0.2), ("bco_pair", 1.0)))
def test_the_shift_moves_both_answers_of_bco(loss, share):
    dpo = Dpo(loss=loss, beta=1.0)
    moved, still = (pairs((-1.0, -5.0), (-2.0, -4.0), shift=shift) for shift in (1.0, 0.0))
    # Rewards 1 and -1; minus 1 they are 0 and -2.
    expected = LN2 + math.log1p(math.exp(-2)) - 2 * math.log1p(math.exp(-1))
    (difference,) = PAIR_LOSSES[loss].compute(moved, dpo) - PAIR_LOSSES[loss].compute(still, dpo)
    assert float(difference) == pytest.approx(share * expected, abs=1e-6)


@pytest.mark.parametrize("margin", (-5000.0, 5000.0))
def test_discopop_is_finite_far_from_0(margin):
    policy_B2 = torch.tensor([[margin, 0.0]], requires_grad=True)
    given = PairInput(logprobs_B2=policy_B2, reference_B2=torch.zeros(1, 2), lengths_B2=torch.ones(1, 2), shift=0.0)
    (loss,) = PAIR_LOSSES["discopop"].compute(given, Dpo(loss="discopop"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(500 if margin < 0 else 0)
    assert policy_B2.grad.tolist() == [[pytest.approx(-0.1 if margin < 0 else 0), pytest.approx(0.1 * (margin < 0))]]


def written_out(loss, w, v, rw, rv, n, m, beta, e, gamma, shift):
    """Each loss as its paper has it, in float64."""

    def s(x):
        return 1 / (1 + torch.exp(-x))

    margin = beta * ((w - rw) - (v - rv))
    odds = [torch.exp(a) / (1 - torch.exp(a)) for a in (w / n, v / m)]
    sigmoid = -(1 - e) * torch.log(s(margin)) - e * torch.log(s(-margin))
    bco = -torch.log(s(beta * (w - rw) - shift)) - torch.log(s(shift - beta * (v - rv)))
    a, b = beta * (w - rw), beta * (v - rv)
    against = (w - v) - (rw - rv).sort().values[(w - v).argsort().argsort()]
    apart = beta * ((w - rw).sort().values - (v - rv).sort().values)
    unpaired = -(1 - e) * torch.log(s(apart)) - e * torch.log(s(-apart))
    q, p = torch.stack([s(margin), s(-margin)]), torch.tensor([[1 - e], [e]], dtype=torch.float64)
    return {
        "sigmoid": sigmoid,
        "ipo": ((w - rw) / n - (v - rv) / m - 1 / (2 * beta)) ** 2,
        "hinge": torch.clamp(1 - margin, min=0),
        "robust": (-(1 - e) * torch.log(s(margin)) + e * torch.log(s(-margin))) / (1 - 2 * e),
        "exo_pair": (q * torch.log(q / p)).sum(0),
        "nca_pair": -torch.log(s(a)) - 0.5 * torch.log(s(-a)) - 0.5 * torch.log(s(-b)),
        "bco_pair": bco,
        "sppo_hard": (w - rw - 0.5 / beta) ** 2 + (v - rv + 0.5 / beta) ** 2,
        "apo_zero": 1 - s(a) + s(b),
        "apo_down": s(a) + 1 - s(margin),
        "discopop": -(1 - s(margin / 0.5)) * torch.log(s(margin)) + s(margin / 0.5) * torch.exp(-margin),
        "aot": -(1 - e) * torch.log(s(beta * against)) - e * torch.log(s(-beta * against)),
        "aot_unpaired": unpaired,
        "mpo": 0.8 * sigmoid + 0.2 * bco,
        "orpo": -beta * torch.log(s(torch.log(odds[0] / odds[1]))),
        "simpo": -(1 - e) * torch.log(s(beta * (w / n - v / m) - gamma))
        - e * torch.log(s(-(beta * (w / n - v / m) - gamma))),
        "cpo": -(1 - e) * torch.log(s(beta * (w - v))) - e * torch.log(s(-beta * (w - v))),
        "cpo_ipo": (w / n - v / m - 1 / (2 * beta)) ** 2,
        "cpo_hinge": torch.clamp(1 - beta * (w - v), min=0),
    }[loss]


@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_values_and_gradients_are_those_of_the_formulas(loss):
    generator = torch.Generator().manual_seed(5)
    lengths_B2 = torch.randint(1, 60, (40, 2), generator=generator).double()
    policy_B2 = (-lengths_B2 * torch.rand(40, 2, generator=generator).double() * 2).requires_grad_()
    reference_B2 = -lengths_B2 * torch.rand(40, 2, generator=generator).double() * 2
    smoothing = 0.1 if loss in SMOOTHED else 0.0
    own = {"simpo": {"gamma": 0.7}, "discopop": {"tau": 0.5}}.get(loss, {})
    dpo = Dpo(loss=loss, beta=0.3, label_smoothing=smoothing, **own)
    margins_B2 = torch.stack([(each[:, 0] - each[:, 1]).detach() for each in (policy_B2, reference_B2)], 1)
    compared_B2 = margins_B2 if loss == "aot" else (policy_B2 - reference_B2).detach()
    matches = matched({number: (row[0], row[1]) for number, row in enumerate(compared_B2.tolist())})
    given = PairInput(
        logprobs_B2=policy_B2.float(),
        reference_B2=reference_B2.float() if dpo.has_reference else None,
        lengths_B2=lengths_B2.float(),
        matched_B2=torch.tensor([matches[number] for number in range(40)]),
        shift=0.4,
    )
    found_B = PAIR_LOSSES[loss].compute(given, dpo)
    columns = [tensor[:, place] for tensor in (policy_B2, reference_B2, lengths_B2) for place in (0, 1)]
    expected_B = written_out(loss, *columns, 0.3, smoothing, 0.7, 0.4)
    if loss == "aot_unpaired":  # its comparisons are between answers of different pairs
        found_B, expected_B = found_B.sum()[None], expected_B.sum()[None]
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


@pytest.mark.parametrize(
    ("keys", "rewards"),
    (
        # Ratios 2 and 1/2 of the two answers.
        ({}, (LN2, -LN2)),
        ({"divergence": "forward_kl"}, (1 / 2, -1.0)),
        ({"divergence": "js"}, (math.log(4 / 3), math.log(2 / 3))),
        ({"divergence": "alpha"}, (2 - 2**0.5, 2 - 2 * 2**0.5)),
        ({"divergence": "alpha", "divergence_alpha": 0.25}, (4 - 4 * 2**-0.25, 4 - 4 * 2**0.25)),
    ),
)
def test_rewards_of_divergences(keys, rewards):
    given = pairs((-1.0 + LN2, -5.0 - LN2), (-1.0, -5.0))
    dpo = Dpo(loss="sigmoid", beta=1.0, **keys)
    assert given.rewards_B2(dpo)[0].tolist() == pytest.approx(rewards, abs=1e-5)
    (loss,) = PAIR_LOSSES["sigmoid"].compute(given, dpo)
    assert float(loss) == pytest.approx(math.log1p(math.exp(rewards[1] - rewards[0])), abs=1e-5)


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_a_reward_is_the_slope_of_its_divergences_f(name):
    a, t = 0.3, torch.tensor([0.2, 0.7, 1.0, 1.5, 4.0], dtype=torch.float64, requires_grad=True)
    f = {
        "reverse_kl": t * t.log() - t,
        "forward_kl": t - t.log(),
        "js": t * (2 * t / (1 + t)).log() + (2 / (1 + t)).log(),
        "alpha": (t ** (1 - a) - (1 - a) * t) / (a * (a - 1)),
    }[name]
    (slope,) = torch.autograd.grad(f.sum(), t)
    found = F_DIVERGENCES[name].reward(t.detach().log(), a)
    torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-12)
    assert float(found[2]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", F_DIVERGENCES)
def test_answers_far_from_the_reference_have_finite_gradients(name):
    policy_B2 = torch.tensor([[-3000.0, 3000.0], [3000.0, -3000.0]], requires_grad=True)
    given = PairInput(logprobs_B2=policy_B2, reference_B2=torch.zeros(2, 2), lengths_B2=torch.ones(2, 2), shift=0.0)
    losses_B = PAIR_LOSSES["sigmoid"].compute(given, Dpo(loss="sigmoid", divergence=name))
    losses_B.sum().backward()
    assert bool(losses_B.isfinite().all()) and bool(policy_B2.grad.isfinite().all())


def test_aot_compares_margins_of_equal_place():
    # Policy margins 4, 0, 2 of pairs 7, 3, 5: pair 3 has the lowest and 7 the highest; so have the references -1, 1, 5.
    margins = {7: (4.0, -1.0), 3: (0.0, 1.0), 5: (2.0, 5.0)}
    found = matched(margins)
    assert {index: values[0] for index, values in found.items()} == {3: -1.0, 5: 1.0, 7: 5.0}
    # References -1, 1, 5 belong to pairs 7, 3, 5; the policy margins at these places are 0, 2, 4.
    assert {index: values[1] for index, values in found.items()} == {7: 0.0, 3: 2.0, 5: 4.0}
    assert matched({}) == {}
    equal = matched({1: (2.0, 3.0), 0: (2.0, 1.0)})  # equal ones by index
    assert equal == {0: (1.0, 2.0), 1: (3.0, 2.0)}
    given = replace(pairs((-1.0, -5.0), (-9.0, -9.0)), matched_B2=torch.tensor([[3.0, 0.0]]))
    (loss,) = PAIR_LOSSES["aot"].compute(given, Dpo(loss="aot", beta=LN3))
    assert float(loss) == pytest.approx(math.log(4 / 3), abs=1e-6)


def test_unpaired_aot_compares_log_ratios_of_equal_place():
    """Chosen log ratios 0 and 2, rejected ones -1 and -3: 0 is compared with -3, and 2 with -1, so that d is 3 beta
    twice. The gradient of the sum is -beta s(-d) for either chosen answer, and its negative for the rejected ones."""
    policy_B2 = torch.tensor([[0.0, -1.0], [2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    values = matched(dict(enumerate(map(tuple, policy_B2.tolist()))))
    assert values == {0: (-3.0, 2.0), 1: (-1.0, 0.0)}
    given = PairInput(
        logprobs_B2=policy_B2,
        reference_B2=torch.zeros(2, 2),
        lengths_B2=torch.ones(2, 2),
        matched_B2=torch.tensor([values[0], values[1]]),
        shift=0.0,
    )
    losses_B = PAIR_LOSSES["aot_unpaired"].compute(given, Dpo(loss="aot_unpaired", beta=LN3 / 3))
    losses_B.sum().backward()
    assert losses_B.detach().sum().item() == pytest.approx(2 * math.log(4 / 3))
    slope = LN3 / 3 / 4
    assert policy_B2.grad.flatten().tolist() == pytest.approx([-slope, slope, -slope, slope])


def test_wpo_weighs_a_pair_by_both_answers():
    """Half as likely as the policy's own tokens for one answer, three times for the other."""
    assert wpo_weights(torch.tensor([[-LN2, LN3], [0.0, 0.0]])).tolist() == pytest.approx([1.5, 1.0])


def test_kto_weighs_labels_against_the_divergence():
    # Rewards ln 3 above and below the divergence: 1 - s(ln 3) = 1/4, 1 - s(-ln 3) = 3/4.
    kto = Kto(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    rewards_B = torch.tensor([LN3 + 1, LN3 + 1, 1 - LN3, 1 - LN3])
    losses_B = kto_losses(rewards_B, torch.tensor([True, False, True, False]), 2.0, kto)
    assert losses_B.tolist() == pytest.approx([2 / 4, 3 * 3 / 4, 2 * 3 / 4, 3 / 4])


def test_apo_zero_of_labels_compares_with_nothing():
    # A divergence of 0: 1 - s(reward) for good answers, s(reward) for bad ones.
    rewards_B = torch.tensor([LN3, LN3, -LN3, -LN3])
    kto = Kto(loss="apo_zero_unpaired", undesirable_weight=2.0)
    losses_B = kto_losses(rewards_B, torch.tensor([True, False, True, False]), 0.0, kto)
    assert losses_B.tolist() == pytest.approx([1 / 4, 2 * 3 / 4, 3 / 4, 2 / 4])


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
