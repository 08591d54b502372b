"""The losses, their gradients and sums against numbers worked by hand and formulas written a second time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiercel.algorithms import LOSSES, LossInput, LossOutput, Totals, policy_loss
from tiercel.algorithms.kl import Kl, k3
from tiercel.config.schema import Algorithm

LONGEST = 10  # rollout.max_new_tokens


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
    tokens: int | None = None,
    **choices: Any,
) -> tuple[LossOutput, Tensor]:
    """Loss and its gradient at the logprobs, with old logprobs such that the ratios are the given ones."""
    logprobs = torch.full((len(ratios),), -1.5, dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=-1.5 - torch.tensor(ratios, dtype=torch.float64).log(),
            kl_N=kl,
            advantages_C=torch.tensor(advantages, dtype=torch.float64),
            completion_of_N=torch.tensor(owners, dtype=torch.int64),
            totals=Totals(tokens=tokens or len(ratios), completions=completions or len(advantages), groups=1),
            longest=LONGEST,
        ),
        Algorithm(**{"clip_low": clip_low, "clip_high": clip_high, "kl": Kl(coef=kl_coef), **choices}),
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
        (1.5, 2.0, -2.6, 0.0),  # rewarded and already more than 1.3 times as likely: -1.3 * 2, flat
        (1.5, -2.0, 3.0, 3.0),  # punished although likelier: never clipped
        (0.5, -2.0, 1.6, 0.0),  # punished and already less than 0.8 times as likely: 0.8 * 2, flat
        (0.5, 2.0, -1.0, -1.0),  # rewarded although less likely: never clipped
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


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_microbatches_sum_to_the_whole(seed, loss):
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
            tokens=len(owners),
            kl=divergences[mine],
            kl_coef=0.1,
            loss=loss,
        )

    whole, whole_gradient = part(0, 6)
    pieces = [part(first, last) for first, last in ((0, 1), (1, 4), (4, 6))]
    torch.testing.assert_close(sum(output.loss for output, _ in pieces), whole.loss)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in pieces]), whole_gradient)
    for name, value in whole.token_sums.items():
        torch.testing.assert_close(sum(output.token_sums[name] for output, _ in pieces), value)
    if loss == "grpo":
        assert float(whole.token_sums["clip/low_fraction"]) > 0 and float(whole.token_sums["clip/high_fraction"]) > 0


def test_a_microbatch_whose_last_completion_scored_nothing():
    output, gradient = run([1.0], [1.0, 5.0], [0])
    assert float(output.loss) == pytest.approx(-0.5)
    assert float(gradient) == -0.5


def test_no_tokens_at_all_is_a_loss_of_zero():
    output, gradient = run([], [], [], completions=4)
    assert float(output.loss) == 0.0
    assert gradient.shape == (0,)


# Each loss once more, one completion after the other, from its paper: lists of tokens, no masks, no shared normaliser.


def clipped_by_hand(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    if advantage >= 0:
        return -advantage * (ratio if float(ratio.detach()) < 1 + high else 0 * ratio + 1 + high)
    return -advantage * (ratio if float(ratio.detach()) > 1 - low else 0 * ratio + 1 - low)


def loss_by_hand(name: str, new: list[Tensor], old: list[Tensor], advantages: list[float]) -> Tensor:
    low, high, tokens = 0.2, 0.3, sum(len(row) for row in new)
    total = torch.zeros((), dtype=torch.float64)
    for policy, before, advantage in zip(new, old, advantages, strict=True):
        length = len(policy)
        if name in ("gspo", "gspo_token", "luspo"):
            ratio = torch.exp((policy - before).sum() / length)
            weight = length if name == "luspo" else 1
            total = total + weight * clipped_by_hand(ratio, advantage, low, high) / len(new)
            continue
        if name == "vespo":
            ratio = math.exp(float((policy - before).sum().detach()))
            k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
            total = total - math.exp(rate) * ratio**k * math.exp(-rate * ratio) * advantage * policy.sum() / tokens
            continue
        for t in range(length):
            ratio = torch.exp(policy[t] - before[t])
            if name == "cispo":
                weight = min(max(float(ratio.detach()), 1 - low), 1 + high)
                term = -weight * advantage * policy[t]
            elif name == "sapo":
                temperature = 1.0 if advantage > 0 else 1.05
                term = -advantage * 4 / temperature / (1 + torch.exp(-temperature * (ratio - 1)))
            else:
                term = clipped_by_hand(ratio, advantage, low, high)
            if name in ("grpo", "sapo"):
                total = total + term / length / len(new)
            elif name == "dr_grpo":
                total = total + term / (LONGEST * len(new))
            else:
                total = total + term / tokens
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_gradient_equals_its_formula(name, seed):
    generator = torch.Generator().manual_seed(100 + seed)
    lengths = [3, 1, 7, 4, 10]
    owners = torch.arange(5).repeat_interleave(torch.tensor(lengths))
    new = -3 * torch.rand(len(owners), generator=generator, dtype=torch.float64)
    old = new + 0.4 * torch.randn(len(owners), generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    leaf = new.clone().requires_grad_()
    expected = loss_by_hand(name, list(leaf.split(lengths)), list(old.split(lengths)), advantages.tolist())
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    given = new.clone().requires_grad_()
    output = policy_loss(
        LossInput(
            logprobs_N=given,
            old_logprobs_N=old,
            kl_N=None,
            advantages_C=advantages,
            completion_of_N=owners,
            totals=Totals(tokens=len(owners), completions=5, groups=2),
            longest=LONGEST,
        ),
        Algorithm(loss=name, clip_low=0.2, clip_high=0.3),
    )
    output.loss.backward()
    torch.testing.assert_close(output.loss.detach(), expected.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(given.grad, expected_gradient, rtol=1e-10, atol=1e-14)


def test_two_sided_clipping_bounds_what_a_punished_token_can_weigh():
    free, _ = run([9.0], [-1.0], [0])
    output, gradient = run([9.0], [-1.0], [0], delta=4.0)
    assert float(free.loss) == pytest.approx(9.0) and float(output.loss) == pytest.approx(4.0)
    assert float(gradient) == 0.0 and float(output.token_sums["clip/high_fraction"]) == 1.0
    alone, _ = run([9.0, 9.0], [-1.0, 1.0], [0, 1], delta=4.0, clip_low=None, clip_high=None)
    assert float(alone.loss) == pytest.approx((4.0 - 4.0) / 2)
    inside, _ = run([3.0], [-1.0], [0], delta=4.0)
    assert float(inside.loss) == pytest.approx(3.0)


def test_clips_that_are_off_leave_the_ratio_alone():
    output, gradient = run([5.0, 0.1], [1.0, -1.0], [0, 1], clip_low=None, clip_high=None)
    assert float(output.loss) == pytest.approx((-5.0 + 0.1) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-2.5, 0.05], dtype=torch.float64))
    assert all(float(value) == 0 for value in output.token_sums.values())


@pytest.mark.parametrize(
    ("normalise", "loss"),
    [
        ("sequence", (-1.0 + 2.0) / 2),  # two completions of means -1 and 2
        ("token", (-1.0 + 2.0 + 2.0) / 3),
        ("constant", (-1.0 + 2.0 + 2.0) / (LONGEST * 2)),
        ("sum", (-1.0 + 2.0 + 2.0) / 2),
    ],
)
def test_any_loss_takes_any_normaliser(normalise, loss):
    output, _ = run([1.0, 1.0, 1.0], [1.0, -2.0], [0, 1, 1], normalise=normalise, loss="dapo")
    assert float(output.loss) == pytest.approx(loss)


def test_the_sequence_ratio_is_the_geometric_mean():
    # ratios 4 and 1/4 of a completion: their geometric mean is 1, so nothing is clipped and both tokens get A / 2
    output, gradient = run([4.0, 0.25], [1.0], [0, 0], loss="gspo")
    assert float(output.loss) == pytest.approx(-1.0)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5], dtype=torch.float64))


def test_luspo_weighs_a_completion_by_its_length():
    # ratios 4 and 1/4, whose mean is 1: gspo's term of a completion of two tokens, twice
    output, gradient = run([4.0, 0.25, 1.0], [1.0, -1.0], [0, 0, 1], loss="luspo")
    assert float(output.loss) == pytest.approx((-2.0 + 1.0) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5, 0.5], dtype=torch.float64))


def test_the_product_of_ratios_is_that_of_rloo():
    # A completion is one action of ratio 1.1 * 1.1, and every token has its whole gradient.
    output, gradient = run([1.1, 1.1, 1.0], [1.0, -1.0], [0, 0, 1], ratio="product")
    assert float(output.loss) == pytest.approx((-1.21 + 1.0) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-0.605, -0.605, 0.5], dtype=torch.float64))
    clipped, flat = run([1.2, 1.2], [1.0], [0, 0], ratio="product")
    assert float(clipped.loss) == pytest.approx(-1.3) and flat.tolist() == [0.0, 0.0]
    huge = [math.exp(500)] * 2  # their product is infinite
    for ratio in ("product", "product_at_token"):
        _, flat = run(huge, [1.0], [0, 0], ratio=ratio)
        assert flat.tolist() == [0.0, 0.0]
    by_token, own = run([1.1, 1.1], [1.0], [0, 0], ratio="product_at_token")
    assert float(by_token.loss) == pytest.approx(-1.21)
    torch.testing.assert_close(own, torch.tensor([-0.605, -0.605], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ratios", "advantage", "weight"),
    (
        ([2.0, 0.5], 1.0, 1.0),  # their product is 1
        ([2.0, 1.0], 1.0, 4 * math.exp(-3)),
        ([2.0, 1.0], -1.0, 8 * math.exp(-2)),
        ([0.5, 1.0], 1.0, 0.25 * math.exp(1.5)),
        ([0.5, 1.0], -1.0, 0.125 * math.exp(1.0)),
        ([1e300, 1e300], 1.0, 0.0),
        ([1e-300, 1e-300], -1.0, 1e-24 * math.exp(2.0)),
    ),
)
def test_vespo_weighs_a_completion_by_its_product_of_ratios(ratios, advantage, weight):
    output, gradient = run(ratios, [advantage], [0, 0], loss="vespo")
    assert float(output.loss) == pytest.approx(weight * advantage * 1.5)
    torch.testing.assert_close(gradient, torch.full((2,), -weight * advantage / 2, dtype=torch.float64))


def test_vespos_powers_and_rates_are_those_of_the_recipe():
    keys = {"gamma_power_positive": 1.0, "gamma_rate_positive": 0.5}
    output, _ = run([2.0], [1.0], [0], loss="vespo", **keys)
    assert float(output.loss) == pytest.approx(2 * math.exp(-0.5) * 1.5)
    output, _ = run([2.0], [-1.0], [0], loss="vespo", **keys)
    assert float(output.loss) == pytest.approx(-8 * math.exp(-2) * 1.5)


def test_gspo_by_token_weighs_each_token_by_itself():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach() - math.log(1.1),
            kl_N=None,
            advantages_C=torch.tensor([1.0], dtype=torch.float64),
            completion_of_N=torch.tensor([0, 0]),
            totals=Totals(tokens=2, completions=1, groups=1),
            longest=LONGEST,
            weights_N=torch.tensor([1.0, 0.0], dtype=torch.float64),
        ),
        Algorithm(loss="gspo_token"),
    )
    output.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.55, 0.0], dtype=torch.float64))


def test_the_gate_of_sapo_has_the_slope_of_the_ratio_at_one():
    # 4 / t sigmoid(0) = 2 / t; slope 4 / t * t / 4 = 1
    output, gradient = run([1.0, 1.0], [1.0, -1.0], [0, 1], loss="sapo")
    assert float(output.loss) == pytest.approx((-2.0 + 2.0 / 1.05) / 2)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize(
    ("keys", "weight"),
    (
        ({}, 1 / 2),
        ({"loss": "dr_grpo"}, 1 / LONGEST),
        ({"loss": "luspo"}, 1.0),
        ({"loss": "dr_grpo", "entropy_mean": "token"}, 1 / 2),
        ({"loss": "luspo", "entropy_mean": "token"}, 1 / 2),
    ),
)
def test_the_entropy_bonus_is_taken_off_the_loss(keys, weight):
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    output = policy_loss(
        LossInput(
            logprobs_N=torch.zeros(2, dtype=torch.float64),
            old_logprobs_N=torch.zeros(2, dtype=torch.float64),
            kl_N=None,
            entropy_N=entropy,
            advantages_C=torch.zeros(1, dtype=torch.float64),
            completion_of_N=torch.tensor([0, 0]),
            totals=Totals(tokens=2, completions=1, groups=1),
            longest=LONGEST,
        ),
        Algorithm(entropy_coef=0.1, **keys),
    )
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(-0.1 * weight * 2)  # the sum of the entropies is 2
    torch.testing.assert_close(entropy.grad, torch.full((2,), -0.1 * weight, dtype=torch.float64))


def test_each_part_can_be_named_by_itself():
    # ratios 4 and 1/4 of a completion, whose geometric mean is 1: dapo clips the first token, the sequence's ratio
    # clips none
    plain, _ = run([4.0, 0.25], [1.0], [0, 0], loss="dapo")
    assert float(plain.loss) == pytest.approx(-(1.3 + 0.25) / 2)
    sequence, gradient = run([4.0, 0.25], [1.0], [0, 0], loss="dapo", ratio="sequence")
    assert float(sequence.loss) == pytest.approx(-1.0)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -0.5], dtype=torch.float64))
    weighted, _ = run([4.0, 0.25], [1.0], [0, 0], loss="dapo", surrogate="weighted")
    assert float(weighted.loss) == pytest.approx((1.3 + 0.8) * 1.5 / 2)  # logprobs are -1.5


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_its_three_parts_named_one_by_one(name):
    parts = LOSSES[name]
    named, gradient = run([1.5, 0.5, 1.0], [1.0, -2.0], [0, 1, 1], loss=name)
    built, same = run(
        [1.5, 0.5, 1.0],
        [1.0, -2.0],
        [0, 1, 1],
        ratio=parts.ratio,
        surrogate=parts.surrogate,
        normalise=parts.normalise,
    )
    assert torch.equal(named.loss, built.loss) and torch.equal(gradient, same)
