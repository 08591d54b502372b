"""Importance weights, computed by hand."""

import math

import pytest
import torch

from tiercel.algorithms import LossInput, Totals, importance_weights, policy_loss
from tiercel.algorithms.correction import Correction, drift_metrics, drift_sums, is_near_policy
from tiercel.algorithms.kl import Kl
from tiercel.config.schema import Algorithm

# two completions: ratios 2, 3 and 1/4, unknown
OLD = torch.log(torch.tensor([0.4, 0.6, 0.1, 0.5]))
SAMPLER = torch.tensor([math.log(0.2), math.log(0.2), math.log(0.4), math.nan])
COMPLETION = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("level", "mode", "weights", "capped"),
    (
        ("token", "truncate", [2.0, 2.5, 0.25, 1.0], [False, True, False, False]),
        ("token", "mask", [2.0, 0.0, 0.0, 1.0], [False, True, True, False]),
        ("sequence", "truncate", [2.5, 2.5, 0.25, 0.25], [True, True, False, False]),
        ("sequence", "mask", [0.0, 0.0, 0.0, 0.0], [True, True, True, True]),
    ),
)
def test_ratios_by_token_and_by_completion_are_cut_or_dropped(level, mode, weights, capped):
    found = importance_weights(OLD, SAMPLER, COMPLETION, 2, Correction(level=level, mode=mode, cap=2.5))
    torch.testing.assert_close(found.values_N, torch.tensor(weights))
    assert found.is_capped_N.tolist() == capped


@pytest.mark.parametrize(
    ("mode", "floor", "weights", "capped"),
    (
        ("truncate", 0.5, [2.0, 2.5, 0.5, 1.0], [False, True, True, False]),
        ("truncate", 0.0, [2.0, 2.5, 0.25, 1.0], [False, True, False, False]),
        ("mask", 0.25, [2.0, 0.0, 0.25, 1.0], [False, True, False, False]),
        ("mask", 0.3, [2.0, 0.0, 0.0, 1.0], [False, True, True, False]),
        ("mask", 0.0, [2.0, 0.0, 0.25, 1.0], [False, True, False, False]),
    ),
)
def test_a_floor_raises_small_ratios_or_masks_them(mode, floor, weights, capped):
    correction = Correction(level="token", mode=mode, cap=2.5, floor=floor)
    found = importance_weights(OLD, SAMPLER, COMPLETION, 2, correction)
    torch.testing.assert_close(found.values_N, torch.tensor(weights))
    assert found.is_capped_N.tolist() == capped


@pytest.mark.parametrize("mode", ("truncate", "mask"))
def test_a_token_that_the_engine_thought_impossible_does_not_make_nan(mode):
    impossible, owner = torch.tensor([-math.inf]), torch.zeros(1, dtype=torch.int64)
    found = importance_weights(torch.zeros(1), impossible, owner, 1, Correction(level="token", mode=mode, cap=2.0))
    assert found.values_N.tolist() == [2.0 if mode == "truncate" else 0.0]


def test_the_loss_weighs_its_policy_term_and_not_the_penalty():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = policy_loss(
        LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach(),
            kl_N=torch.tensor([0.5, 0.25]),
            advantages_C=torch.tensor([2.0]),
            completion_of_N=torch.tensor([0, 0]),
            totals=Totals(tokens=2, completions=1, groups=1),
            longest=4,
            weights_N=torch.tensor([0.5, 0.0]),
        ),
        Algorithm(kl=Kl(coef=0.1)),
    ).loss
    # token 1: -0.5 * 2 + 0.05, token 2: 0 + 0.025, mean of the two
    assert loss.item() == pytest.approx((-0.95 + 0.025) / 2)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0])


def test_punished_completions_that_the_policy_has_left_are_masked_whole():
    policy, sampler = torch.log(torch.tensor([0.1, 0.5, 0.1, 0.5, 0.5])), torch.log(torch.tensor([0.5] * 5))
    # means of log(sampler / policy): ln 5 / 2 of completions 0 and 1, 0 of completion 2
    owners, advantages = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([-1.0, 1.0, -1.0])
    near = is_near_policy(policy, sampler, advantages, owners, delta=0.8)
    assert near.tolist() == [False, False, True, True, True]
    assert is_near_policy(policy, sampler, advantages, owners, delta=0.81).tolist() == [True] * 5


def test_drift_by_hand():
    # ratios of the tokens 2, 3 and 1/4, and 1 if the engine does not know; of the completions 6 and 1/4
    sums = {name: float(value) for name, value in drift_sums(OLD, SAMPLER, COMPLETION, 2).items()}
    found = drift_metrics(sums)
    assert found["off_policy/kl"] == pytest.approx(-math.log(2 * 3 / 4) / 4)
    assert found["off_policy/chi2"] == pytest.approx((4 + 9 + 1 / 16 + 1) / 4 - 1)
    assert found["off_policy/ess"] == pytest.approx(6.25**2 / (2 * (36 + 1 / 16)))
    assert drift_metrics({}) == {}


def test_drift_of_an_impossible_token_stays_a_number():
    sums = drift_sums(torch.zeros(1), torch.tensor([-math.inf]), torch.zeros(1, dtype=torch.int64), 1)
    assert all(math.isfinite(value) for value in drift_metrics({k: float(v) for k, v in sums.items()}).values())
