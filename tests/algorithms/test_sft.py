"""Losses of an answer's tokens, computed by hand."""

import math

import pytest
import torch

from tiercel.algorithms.sft import TOKEN_LOSSES, Sft

LOGPROBS = [math.log(0.5), math.log(0.25), 0.0]


@pytest.mark.parametrize(
    ("name", "losses", "slopes"),
    (
        ("nll", [math.log(2), math.log(4), 0.0], [-1.0, -1.0, -1.0]),
        # The gradient is -p, that of p itself, because the weight is a constant.
        ("dft", [math.log(2) / 2, math.log(4) / 4, 0.0], [-0.5, -0.25, -1.0]),
    ),
)
def test_a_loss_of_tokens_and_its_gradient(name, losses, slopes):
    logprobs_N = torch.tensor(LOGPROBS, requires_grad=True)
    found_N = TOKEN_LOSSES[name].compute(logprobs_N)
    found_N.sum().backward()
    assert found_N.tolist() == pytest.approx(losses) and logprobs_N.grad.tolist() == pytest.approx(slopes)


def test_a_token_without_probability_has_a_finite_loss_of_dft():
    logprobs_N = torch.tensor([-1000.0], requires_grad=True)
    TOKEN_LOSSES["dft"].compute(logprobs_N).sum().backward()
    assert logprobs_N.grad.item() == 0


def test_the_plain_loss_is_told():
    assert Sft().is_plain
    assert not any(each.is_plain for each in (Sft(loss="dft"), Sft(label_smoothing=0.1), Sft(neftune_alpha=5)))
