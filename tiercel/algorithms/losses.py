"""Policy-gradient losses on per-token logprobs. Each is a ratio, a surrogate of it and a normaliser.

N scored tokens of a microbatch, C its completions. Normalisers are totals of the whole minibatch over all ranks,
so the sum of the microbatches' losses is the loss, however it was cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.algorithms import completions
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.surrogates import SurrogateOf, clipped, gated, weighted
from tiercel.config.schema import Algorithm


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
    """What a loss needs of a microbatch. Completions are whole: none has tokens in another microbatch."""

    logprobs_N: Tensor  # with gradient
    old_logprobs_N: Tensor  # of the policy that the ratio is taken against, detached
    kl_N: Tensor | None  # divergence from the reference, with gradient; None where it is no term of the loss
    advantages_C: Tensor
    completion_of_N: Tensor  # int64
    totals: Totals
    longest: int  # tokens that a completion may have (rollout.max_new_tokens)
    entropy_N: Tensor | None = None  # with gradient; None where it is no term of the loss
    weights_N: Tensor | None = None  # factors of the policy-gradient term, detached; None is 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The microbatch's share of the loss, and sums over its tokens for the metrics."""

    loss: Tensor
    token_sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss of the catalogue."""

    ratio: str  # one of RATIOS
    surrogate: SurrogateOf
    normalise: str  # one of NORMALISERS, where the recipe names none
    formula: str
    source: str
    use: str


def policy_loss(batch: LossInput, algorithm: Algorithm) -> LossOutput:
    """w L(ratio, A) + kl.coef KL - entropy_coef entropy at each token, times the normaliser, summed.

    `token_sums` holds clip/low_fraction and clip/high_fraction, and kl/mean where there is such a term.
    """
    loss = LOSSES[algorithm.loss]
    count = len(batch.advantages_C)
    advantages_N = batch.advantages_C[batch.completion_of_N]
    ratio_N = RATIOS[loss.ratio](batch.logprobs_N - batch.old_logprobs_N, batch.completion_of_N, count)
    surrogate = loss.surrogate(ratio_N, advantages_N, batch.logprobs_N, algorithm)
    terms_N = surrogate.terms_N if batch.weights_N is None else batch.weights_N * surrogate.terms_N
    token_sums = {"clip/low_fraction": surrogate.is_low_N.sum(), "clip/high_fraction": surrogate.is_high_N.sum()}
    if batch.kl_N is not None:
        terms_N = terms_N + algorithm.kl.coef * batch.kl_N
        token_sums["kl/mean"] = batch.kl_N.detach().sum()
    if batch.entropy_N is not None:
        terms_N = terms_N - algorithm.entropy_coef * batch.entropy_N
    normalise = NORMALISERS[algorithm.normalise or loss.normalise]
    return LossOutput(loss=(terms_N * normalise(batch, count)).sum(), token_sums=token_sums)


def per_sequence(batch: LossInput, count: int) -> Tensor:
    """1 / (tokens of the completion x completions), at each token."""
    lengths_C = completions.lengths(batch.completion_of_N, count).to(batch.logprobs_N.dtype)
    return 1.0 / (lengths_C[batch.completion_of_N] * batch.totals.completions)


def per_token(batch: LossInput, count: int) -> Tensor:
    """1 / tokens of the minibatch, at each token."""
    return torch.full_like(batch.logprobs_N.detach(), 1.0 / max(1, batch.totals.tokens))


def per_constant(batch: LossInput, count: int) -> Tensor:
    """1 / (rollout.max_new_tokens x completions), at each token: no term depends on a length that was drawn."""
    return torch.full_like(batch.logprobs_N.detach(), 1.0 / (batch.longest * max(1, batch.totals.completions)))


NORMALISERS: dict[str, Callable[[LossInput, int], Tensor]] = {
    "sequence": per_sequence,
    "token": per_token,
    "constant": per_constant,
}

CLIPPED = "-min(r A, clip(r) A)"
LOSSES: dict[str, Loss] = {
    "grpo": Loss(
        ratio="token",
        surrogate=clipped,
        normalise="sequence",
        formula=f"{CLIPPED}, r of the token; mean over each completion's tokens, then over completions",
        source="DeepSeekMath 2024, equation 3",
        use="the default; short and long completions weigh the same",
    ),
    "bnpo": Loss(
        ratio="token",
        surrogate=clipped,
        normalise="token",
        formula=f"{CLIPPED}, r of the token; mean over the tokens of the batch",
        source="TRL's and ms-swift's `bnpo`",
        use="what those call by this name takes the mean over each device's microbatch; here the batch is the "
        "minibatch over all ranks, so it equals `dapo`",
    ),
    "dr_grpo": Loss(
        ratio="token",
        surrogate=clipped,
        normalise="constant",
        formula=f"{CLIPPED}, r of the token; sum over tokens / (completions x `rollout.max_new_tokens`)",
        source="Dr. GRPO: Liu et al. 2025",
        use="no bias towards long wrong completions; goes with `advantage: group_centred`",
    ),
    "dapo": Loss(
        ratio="token",
        surrogate=clipped,
        normalise="token",
        formula=f"{CLIPPED}, r of the token; mean over all tokens of the minibatch",
        source="DAPO: Yu et al. 2025",
        use="long chains of thought; goes with `clip_high: 0.28`, `resample` and the reward `soft_overlong`",
    ),
    "gspo": Loss(
        ratio="sequence",
        surrogate=clipped,
        normalise="sequence",
        formula=f"{CLIPPED}, r the geometric mean of the completion's token ratios; mean over completions",
        source="GSPO: Zheng et al. 2025",
        use="mixtures of experts and long completions; bounds are far narrower, such as 3e-4 and 4e-4",
    ),
    "gspo_token": Loss(
        ratio="sequence_at_token",
        surrogate=clipped,
        normalise="sequence",
        formula=f"{CLIPPED}, r of the completion in value, with the gradient of the token's own",
        source="GSPO-token: Zheng et al. 2025",
        use="as `gspo` where tokens of a completion weigh differently (`top_entropy`, a correction by token)",
    ),
    "cispo": Loss(
        ratio="token",
        surrogate=weighted,
        normalise="token",
        formula="-clip(r) A log p, r without gradient; mean over all tokens of the minibatch",
        source="CISPO: MiniMax-M1 2025",
        use="several updates per rollout where rare tokens matter; goes with `clip_low: null` and a wide `clip_high`",
    ),
    "sapo": Loss(
        ratio="token",
        surrogate=gated,
        normalise="sequence",
        formula="-(4 / t) sigmoid(t (r - 1)) A, t = `gate_positive` or `gate_negative` by the sign of A; "
        "mean over each completion's tokens, then over completions",
        source="SAPO: Gao et al. 2025",
        use="instead of clipping, where bounds are hard to tune",
    ),
}
