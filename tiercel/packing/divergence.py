"""The divergence of the policy from a teacher, over the whole vocabulary in chunks of tokens.

Shape suffixes: docs/shapes.md. Here M are the tokens of a chunk and K the words whose logprobs a teacher gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tiercel.algorithms.preference import log1mexp

Made = TypeVar("Made")
OfChunk = Callable[[Tensor, Tensor, slice], Tensor]  # states (M, H), the head's weight, which tokens -> (M,)


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTokens:
    """What a teacher says about scored tokens: the logprobs of the sampled tokens and, if more is compared, either its
    states, from which its head computes the distribution, or the logprobs of some words."""

    drawn_N: Tensor  # fp32
    states_NH: Tensor | None = None
    words_NK: Tensor | None = None  # int64, the most likely words
    logprobs_NK: Tensor | None = None  # fp32, of these words

    def __getitem__(self, tokens: slice | Tensor) -> "TeacherTokens":
        """Return what the teacher says about some of the tokens."""
        return _each(lambda parts: parts[0][tokens], [self])

    @staticmethod
    def joined(parts: Sequence["TeacherTokens"]) -> "TeacherTokens":
        """Join what the teacher says about several runs of tokens."""
        return _each(torch.cat, parts)

    def moved(self, device: torch.device) -> "TeacherTokens":
        """Return a copy on a device. On the CPU it can be read at once."""
        return _each(lambda parts: parts[0].to(device, non_blocking=device.type != "cpu"), [self])


def _each(change: Callable[[list[Tensor]], Tensor], parts: Sequence[TeacherTokens]) -> TeacherTokens:
    made = {}
    for name in ("states_NH", "words_NK", "logprobs_NK"):
        given = [value for part in parts if (value := getattr(part, name)) is not None]
        made[name] = change(given) if given else None
    return TeacherTokens(drawn_N=change([part.drawn_N for part in parts]), **made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A teacher's distribution at the scored tokens of a pass."""

    tokens: TeacherTokens
    distribution: Callable[[Tensor], Tensor] | None  # (M, V) from the teacher's states; None if it gives none
    measure: Callable[[Tensor, Tensor], Tensor]  # a divergence (M,) of the policy's logprobs from the teacher's
    is_by_row: bool = False  # the teacher's prompt is its own, so rows of one prompt may have different teachers

    def of(self, logprobs_MV: Tensor, chunk: slice) -> Tensor:
        """Compute the divergence (M,) at a chunk of tokens, from the policy's logprobs."""
        told = self.tokens[chunk].moved(logprobs_MV.device)
        if told.states_NH is not None and self.distribution is not None:
            with torch.no_grad():
                teacher_MV = self.distribution(told.states_NH)
            return self.measure(*common_vocabulary(logprobs_MV, teacher_MV))
        assert told.words_NK is not None and told.logprobs_NK is not None
        return self.measure(with_rest(logprobs_MV.gather(1, told.words_NK)), with_rest(told.logprobs_NK))


def common_vocabulary(one_MV: Tensor, other_MV: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the words that only the larger of two vocabularies has, because checkpoints of one tokenizer may be padded
    to different sizes. What remains is normalised to a distribution again."""
    words = min(one_MV.shape[1], other_MV.shape[1])
    cut = [each if each.shape[1] == words else each[:, :words].log_softmax(-1) for each in (one_MV, other_MV)]
    return cut[0], cut[1]


def with_rest(logprobs_MK: Tensor) -> Tensor:
    """Add the logprob of all other words together: (M, K + 1)."""
    rest_M = log1mexp(logprobs_MK.logsumexp(-1))
    return torch.cat([logprobs_MK, rest_M[:, None]], dim=1)


def divergence(hidden_NH: Tensor, weight_VH: Tensor, chunks: Sequence[slice], of_chunk: OfChunk) -> Tensor:
    """Compute the divergence (N,) with its gradient, one chunk of logits at a time. For a frozen head, the gradient
    with respect to the states is computed at once and kept (N x H numbers); a trained head recomputes each chunk in the
    backward pass."""
    if weight_VH.requires_grad:
        return torch.cat(recomputed(of_chunk, hidden_NH, weight_VH, chunks))
    return _PrecomputedGradient.apply(hidden_NH, weight_VH, chunks, of_chunk)


def recomputed(
    of_chunk: Callable[[Tensor, Tensor, slice], Made], hidden_NH: Tensor, weight_VH: Tensor, chunks: Sequence[slice]
) -> list[Made]:
    """Compute chunk by chunk what is computed again in the backward pass. The weight may have a gradient."""
    return [checkpoint(of_chunk, hidden_NH[chunk], weight_VH, chunk, use_reentrant=False) for chunk in chunks]


class _PrecomputedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, chunks, of_chunk):
        needs_gradient = ctx.needs_input_grad[0]
        values, gradient_NH = [], torch.zeros_like(hidden_NH) if needs_gradient else None
        for chunk in chunks:
            with torch.set_grad_enabled(needs_gradient):
                hidden_MH = hidden_NH[chunk].detach().requires_grad_(needs_gradient)
                values_M = of_chunk(hidden_MH, weight_VH, chunk)
                if gradient_NH is not None and len(values_M):
                    gradient_NH[chunk] = torch.autograd.grad(values_M.sum(), hidden_MH)[0]
            values.append(values_M.detach())
        if gradient_NH is not None:
            ctx.save_for_backward(gradient_NH)
        return torch.cat(values)

    @staticmethod
    def backward(ctx, gradient_N):
        (gradient_NH,) = ctx.saved_tensors
        return (gradient_N[:, None] * gradient_NH).to(gradient_NH.dtype), None, None, None
