"""The GRPO loss, its gradient and its sums against numbers worked by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiercel.algorithms import LOSSES, LossInput, LossOutput, Totals
from tiercel.algorithms.kl import k3
from tiercel.algorithms.losses import grpo


def run(
    ratios: list[float],
    advantages: list[float],
    owners: list[int],
    *,
    completions: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[LossOutput, Tensor]:
    """Loss and its gradient at the logprobs, with old logprobs such that the ratios are the given ones."""
    logprobs = torch.full((len(ratios),), -1.5, dtype=torch.float64, requires_grad=True)
    output = grpo(
        LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=-1.5 - torch.tensor(ratios, dtype=torch.float64).log(),
            kl_N=kl,
            advantages_C=torch.tensor(advantages, dtype=torch.float64),
            completion_of_N=torch.tensor(owners, dtype=torch.int64),
            totals=Totals(tokens=len(ratios), completions=completions or len(advantages), groups=1),
            clip_low=clip_low,
            clip_high=clip_high,
            kl_coef=kl_coef,
        )
    )
    output.loss.backward()
    return replace(output, loss=output.loss.detach()), logprobs.grad


def test_value_and_gradient_of_two_lengths_by_hand():
    output, gradient = run([1.0, 1.1, 0.9], [1.0, -2.0], [0, 1, 1])
    # 1/2 * (-1 * 1) + 1/2 * mean(2 * 1.1, 2 * 0.9) = -0.5 + 1
    assert float(output.loss) == pytest.approx(0.5)
    # -advantage * ratio / (its completion's length * completions)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.55, 0.45], dtype=torch.float64))


def test_a_long_completion_weighs_as_much_as_a_short_one():
    output, gradient = run([1.0] * 5, [1.0, 1.0], [0, 1, 1, 1, 1])
    assert float(output.loss) == pytest.approx(-1.0)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, *[-0.125] * 4], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 2.0, -2.6, 0.0),  # rewarded and already likelier than 1.3 times: -1.3 * 2, flat
        (1.5, -2.0, 3.0, 3.0),  # punished though likelier: never clipped
        (0.5, -2.0, 1.6, 0.0),  # punished and already less than 0.8 times as likely: 0.8 * 2, flat
        (0.5, 2.0, -1.0, -1.0),  # rewarded though less likely: never clipped
        (1.25, 2.0, -2.5, -2.5),  # between 1 + clip_low and 1 + clip_high: inside
        (0.75, -2.0, 1.6, 0.0),  # between 1 - clip_high and 1 - clip_low: outside
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_both_clips_by_hand(ratio, advantage, loss, gradient):
    output, slope = run([ratio], [advantage], [0])
    assert float(output.loss) == pytest.approx(loss, abs=1e-12)
    assert float(slope) == pytest.approx(gradient, abs=1e-12)


def test_sums_count_only_tokens_whose_clip_is_active():
    output, _ = run([1.5, 1.5, 0.5, 0.5, 1.0], [1.0, -1.0], [0, 1, 0, 1, 1])
    sums = {name: float(value) for name, value in output.token_sums.items()}
    assert sums == {"clip/low_fraction": 1.0, "clip/high_fraction": 1.0}


def test_kl_term_by_hand():
    policy = torch.tensor([0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor([0.25, 0.5], dtype=torch.float64).log()
    divergence = k3(policy, reference)
    output, _ = run([1.0, 1.0], [0.0, 0.0], [0, 1], kl=divergence, kl_coef=0.1)
    # 0.1 * mean(ln 2 - 1/2, 1 - ln 2) = 0.1 * 1/4; gradient 0.1 * 1/2 * (1 - q/p)
    assert float(output.loss) == pytest.approx(0.025)
    torch.testing.assert_close(policy.grad, torch.tensor([0.025, -0.05], dtype=torch.float64))
    assert float(output.token_sums["kl/mean"]) == pytest.approx(0.5)
    assert not output.token_sums["kl/mean"].requires_grad


def test_the_kl_term_keeps_pulling_where_the_ratio_is_clipped():
    divergence = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    output, gradient = run([1.5], [1.0], [0], kl=divergence, kl_coef=0.5)
    assert float(output.loss) == pytest.approx(-1.3 + 1.0)
    assert float(gradient) == 0.0
    assert float(divergence.grad) == 0.5


@pytest.mark.parametrize("seed", range(3))
def test_microbatches_sum_to_the_whole(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator)
    owners = torch.arange(6).repeat_interleave(lengths)
    ratios = torch.exp(0.4 * torch.randn(len(owners), generator=generator))
    advantages = torch.randn(6, generator=generator)
    divergences = torch.rand(len(owners), generator=generator, dtype=torch.float64)

    def part(first: int, last: int) -> tuple[LossOutput, Tensor]:
        mine = (owners >= first) & (owners < last)
        return run(
            ratios[mine].tolist(),
            advantages[first:last].tolist(),
            (owners[mine] - first).tolist(),
            completions=6,
            kl=divergences[mine],
            kl_coef=0.1,
        )

    whole, whole_gradient = part(0, 6)
    pieces = [part(first, last) for first, last in ((0, 1), (1, 4), (4, 6))]
    torch.testing.assert_close(sum(output.loss for output, _ in pieces), whole.loss)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in pieces]), whole_gradient)
    for name, value in whole.token_sums.items():
        torch.testing.assert_close(sum(output.token_sums[name] for output, _ in pieces), value)
    assert float(whole.token_sums["clip/low_fraction"]) > 0 and float(whole.token_sums["clip/high_fraction"]) > 0


def test_a_microbatch_whose_last_completion_scored_nothing():
    output, gradient = run([1.0], [1.0, 5.0], [0])
    assert float(output.loss) == pytest.approx(-0.5)
    assert float(gradient) == -0.5


def test_no_tokens_at_all_is_a_loss_of_zero():
    output, gradient = run([], [], [], completions=4)
    assert float(output.loss) == 0.0
    assert gradient.shape == (0,)


def test_the_recipes_name_chooses_it():
    assert LOSSES["grpo"] is grpo
