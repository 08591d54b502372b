"""Policy-gradient losses on per-token logprobs.

N scored tokens of a microbatch, C its completions. Normalisers are totals of the whole minibatch over all ranks,
so the sum of the microbatches' losses is the loss, however it was cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sizes of a minibatch over all ranks."""

    tokens: int
    completions: int
    groups: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            tokens=self.tokens + other.tokens,
            completions=self.completions + other.completions,
            groups=self.groups + other.groups,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInput:
    """What a loss needs of a microbatch."""

    logprobs_N: Tensor  # with gradient
    old_logprobs_N: Tensor  # of the policy that the ratio is taken against, detached
    kl_N: Tensor | None  # divergence from the reference, with gradient
    advantages_C: Tensor
    completion_of_N: Tensor  # int64
    totals: Totals
    clip_low: float
    clip_high: float
    kl_coef: float
    weights_N: Tensor | None = None  # importance weights of the policy-gradient term, detached; None is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The microbatch's share of the loss, and sums over its tokens for the metrics."""

    loss: Tensor
    token_sums: Mapping[str, Tensor]


def grpo(batch: LossInput) -> LossOutput:
    """-w min(ratio A, clip(ratio) A) + kl_coef KL: mean over each completion's tokens, then over completions.

    DeepSeekMath (2024), equation 3, with a lower and an upper clip of their own (DAPO, 2025).
    """
    ratio_N = (batch.logprobs_N - batch.old_logprobs_N).exp()
    advantages_N = batch.advantages_C[batch.completion_of_N]
    clipped_N = ratio_N.clamp(1 - batch.clip_low, 1 + batch.clip_high)
    token_loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if batch.weights_N is not None:
        token_loss_N = batch.weights_N * token_loss_N
    token_sums = {
        "clip/low_fraction": ((ratio_N < 1 - batch.clip_low) & (advantages_N < 0)).sum(),
        "clip/high_fraction": ((ratio_N > 1 + batch.clip_high) & (advantages_N > 0)).sum(),
    }
    if batch.kl_N is not None:
        token_loss_N = token_loss_N + batch.kl_coef * batch.kl_N
        token_sums["kl/mean"] = batch.kl_N.detach().sum()
    lengths_C = torch.bincount(batch.completion_of_N, minlength=len(batch.advantages_C))
    weights_N = 1.0 / (lengths_C[batch.completion_of_N] * batch.totals.completions)
    return LossOutput(loss=(token_loss_N * weights_N).sum(), token_sums=token_sums)


LOSSES: dict[str, Callable[[LossInput], LossOutput]] = {"grpo": grpo}
