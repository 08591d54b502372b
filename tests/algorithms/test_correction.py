"""Importance weights, by hand."""

import math

import pytest
import torch

from tiercel.algorithms import LOSSES, LossInput, Totals, importance_weights

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
    found = importance_weights(OLD, SAMPLER, COMPLETION, level=level, mode=mode, cap=2.5)
    torch.testing.assert_close(found.values_N, torch.tensor(weights))
    assert found.is_capped_N.tolist() == capped


@pytest.mark.parametrize("mode", ("truncate", "mask"))
def test_a_token_that_the_engine_thought_impossible_does_not_make_nan(mode):
    found = importance_weights(
        torch.zeros(1), torch.tensor([-math.inf]), torch.zeros(1, dtype=torch.int64), level="token", mode=mode, cap=2.0
    )
    assert found.values_N.tolist() == [2.0 if mode == "truncate" else 0.0]


def test_the_loss_weighs_its_policy_term_and_not_the_penalty():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = LOSSES["grpo"](
        LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach(),
            kl_N=torch.tensor([0.5, 0.25]),
            advantages_C=torch.tensor([2.0]),
            completion_of_N=torch.tensor([0, 0]),
            totals=Totals(tokens=2, completions=1, groups=1),
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.1,
            weights_N=torch.tensor([0.5, 0.0]),
        )
    ).loss
    # token 1: -0.5 * 2 + 0.05, token 2: 0 + 0.025, mean of the two
    assert loss.item() == pytest.approx((-0.95 + 0.025) / 2)
    loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 0.0])
