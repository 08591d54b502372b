"""The head: log-probabilities of given tokens without logits of the whole batch.

Shape suffixes: N scored tokens, H hidden size, V vocabulary, M tokens of a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**24  # elements of the largest logits tensor that exists at one time
NEVER = -1e30  # a placeholder's logit: its probability is exactly 0 and 0 * NEVER is still 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """Result of a learner's pass over a microbatch."""

    logprobs_N: Tensor  # fp32, with gradient where the pass has one
    entropy_N: Tensor  # fp32, nats, detached


class TokenHead(nn.Module):
    """Log-softmax(h W^T / temperature) at the target tokens, vision placeholders excluded.

    A frozen head goes over the vocabulary once, in chunks, and keeps d logp_n / d h_n, which is
    (W[y_n] - sum_v p_nv W[v]) / temperature: N x H numbers instead of N x V, exact for any loss of logp.
    A trained head recomputes each chunk in the backward pass, since its weight needs a gradient too.
    """

    def __init__(self, linear: nn.Linear, placeholder_ids: tuple[int, ...]):
        super().__init__()
        self.linear = linear
        self.placeholder_ids = placeholder_ids

    def forward(self, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> TokenScores:
        weight_VH = self.linear.weight
        excluded = [i for i in self.placeholder_ids if i < weight_VH.shape[0]]
        if weight_VH.requires_grad:
            logprobs_N, entropy_N = _recomputed(hidden_NH, weight_VH, targets_N, temperature, excluded)
        else:
            logprobs_N, entropy_N = _KeptJacobian.apply(hidden_NH, weight_VH, targets_N, temperature, excluded)
        return TokenScores(logprobs_N=logprobs_N, entropy_N=entropy_N.detach())


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    """At least one, though it be empty: a trained head takes part in the backward pass in any case."""
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]


def _log_softmax(hidden_MH: Tensor, weight_VH: Tensor, temperature: float, excluded: list[int]) -> Tensor:
    """fp32 (M, V)."""
    logits_MV = (hidden_MH @ weight_VH.T).float() / temperature
    if excluded:
        logits_MV = logits_MV.index_fill(1, torch.tensor(excluded, device=logits_MV.device), NEVER)
    return logits_MV.log_softmax(-1)


class _KeptJacobian(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature, excluded):
        needs_gradient = ctx.needs_input_grad[0]
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        jacobian_NH = torch.empty_like(hidden_NH) if needs_gradient else None
        for chunk in _chunks(len(targets_N), weight_VH.shape[0]):
            logprobs_MV = _log_softmax(hidden_NH[chunk], weight_VH, temperature, excluded)
            logprobs_N[chunk] = logprobs_MV.gather(1, targets_N[chunk, None])[:, 0]
            probabilities_MV = logprobs_MV.exp()
            entropy_N[chunk] = -(probabilities_MV * logprobs_MV).sum(-1)
            if jacobian_NH is not None:
                expected_MH = probabilities_MV.to(weight_VH.dtype) @ weight_VH
                jacobian_NH[chunk] = (weight_VH[targets_N[chunk]] - expected_MH) / temperature
        ctx.mark_non_differentiable(entropy_N)
        if jacobian_NH is not None:
            ctx.save_for_backward(jacobian_NH)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, gradient_N, _):
        (jacobian_NH,) = ctx.saved_tensors
        return (gradient_N[:, None] * jacobian_NH).to(jacobian_NH.dtype), None, None, None, None


def _recomputed(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float, excluded: list[int]
) -> tuple[Tensor, Tensor]:
    def scores(hidden_MH: Tensor, weight: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_MV = _log_softmax(hidden_MH, weight, temperature, excluded)
        with torch.no_grad():
            entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        return logprobs_MV.gather(1, targets_M[:, None])[:, 0], entropy_M

    pieces = [
        checkpoint(scores, hidden_NH[chunk], weight_VH, targets_N[chunk], use_reentrant=False)
        for chunk in _chunks(len(targets_N), weight_VH.shape[0])
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
