"""The head: log-probabilities of given tokens, without the logits of the whole batch.

Shape suffixes: docs/shapes.md. Here M are the tokens of a chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tiercel.devices import moved
from tiercel.models.layers.float32_scores import has_wide_product
from tiercel.packing.divergence import Target, divergence, recomputed
from tiercel.packing.pass_options import NOTHING, PassOptions

NEVER = -1e30  # a placeholder's logit: its probability is exactly 0, and 0 * NEVER is 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsTile:
    """The most logits that may exist at a time."""

    tokens: int  # of a frozen head
    words: int  # of a frozen head
    logits: int  # of a trained head, or for the gradient of the entropy; whole rows of the vocabulary


TILE = {"cpu": LogitsTile(tokens=512, words=4096, logits=2**24)}  # fits into the last-level cache
GPU_TILE = LogitsTile(tokens=4096, words=16384, logits=2**28)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """How the products of states and words become logits: capped, divided by the temperature, and without the
    placeholders."""

    temperature: float
    excluded: tuple[int, ...]
    cap: float | None = None  # the c in c tanh(x / c)


class TokenScores(NamedTuple):
    """The result of a learner's pass over a microbatch. It is a tuple because FSDP2 and DeepSpeed look for tensors in
    tuples."""

    logprobs_N: Tensor  # fp32, with gradient if the pass has one
    entropy_N: Tensor  # fp32, in nats; detached unless its gradient was requested
    divergence_N: Tensor | None = None  # fp32, from a teacher, with gradient; None without a teacher
    squares_N: Tensor | None = None  # fp32, log of the sum of p² over all words, detached; None unless requested
    values_N: Tensor | None = None  # fp32, of a reward model, with gradient; there are no logprobs and no entropy then

    def of(self, which_N: Tensor) -> "TokenScores":
        """Return the scores of tokens, which may name one several times; gradients add up there."""
        return TokenScores._make(each if each is None or not len(each) else each[which_N] for each in self)


class TokenHead(nn.Module):
    """The head that computes log-softmax(h W^T / temperature) at the target tokens, without vision placeholders.

    A frozen head goes over the vocabulary once, in tiles with a running maximum (Milakov & Gimelshein 2018), and keeps
    d logp_n / d h_n, which is (W[y_n] - sum_v p_nv W[v]) / temperature: N x H numbers instead of N x V, exact for any
    loss of logp. The same sums give the entropy, since the mean logit is h_n . sum_v p_nv W[v] / temperature. If a cap
    bends the logits, each W[v] is weighted by the slope at its logit, and the mean logit is a separate sum. A trained
    head recomputes each chunk in the backward pass, because its weight needs a gradient too. The gradient of the
    entropy and smoothed logprobs are computed in the same way, because this Jacobian does not give them.
    """

    def __init__(self, linear: nn.Linear, placeholder_ids: tuple[int, ...], cap: float | None = None):
        super().__init__()
        self.linear = linear
        self.placeholder_ids = placeholder_ids
        self.cap = cap
        self.tile: LogitsTile | None = None  # None: chosen by device

    def scaling(self, temperature: float) -> Scaling:
        """Return how products become logits."""
        excluded = tuple(i for i in self.placeholder_ids if i < self.linear.weight.shape[0])
        return Scaling(temperature=temperature, excluded=excluded, cap=self.cap)

    def distribution(self, hidden_MH: Tensor, temperature: float) -> Tensor:
        """Compute the logprobs (M, V), fp32, of all words."""
        return _log_softmax(hidden_MH.to(self.linear.weight.dtype), self.linear.weight, self.scaling(temperature))

    def forward(
        self,
        hidden_NH: Tensor,
        targets_N: Tensor,
        temperature: float,
        *,
        options: PassOptions = NOTHING,
    ) -> TokenScores:
        weight_VH, scaling, target = self.linear.weight, self.scaling(temperature), options.target
        tile = self.tile or TILE.get(hidden_NH.device.type, GPU_TILE)
        chunks = _chunks(len(hidden_NH), weight_VH.shape[0], tile.logits)
        if weight_VH.requires_grad or options.needs_whole_distribution:
            logprobs_N, entropy_N = _recomputed(hidden_NH, weight_VH, targets_N, scaling, chunks, options)
        else:
            logprobs_N, entropy_N = _KeptJacobian.apply(hidden_NH, weight_VH, targets_N, scaling, tile)
        return TokenScores(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N if options.entropy_gradient else entropy_N.detach(),
            divergence_N=None if target is None else _divergence(hidden_NH, weight_VH, target, scaling, chunks),
            squares_N=_squares(hidden_NH, weight_VH, scaling, chunks) if options.squares else None,
        )


def _chunks(tokens: int, vocabulary: int, logits: int) -> list[slice]:
    """Divide the tokens into chunks. If there are no tokens, return one empty chunk, because a trained head must be
    part of every backward pass."""
    size = max(1, logits // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]


def _log_softmax(hidden_MH: Tensor, weight_VH: Tensor, scaling: Scaling) -> Tensor:
    """Compute the logprobs (M, V), fp32, of all words."""
    device = hidden_MH.device.type
    if torch.is_autocast_enabled(device):  # it would make the same casts, and then round the sums
        hidden_MH, weight_VH = (each.to(torch.get_autocast_dtype(device)) for each in (hidden_MH, weight_VH))
    if has_wide_product(hidden_MH, weight_VH):
        logits_MV = _WideProduct.apply(hidden_MH, weight_VH)
    else:
        logits_MV = (hidden_MH @ weight_VH.T).float()
    if scaling.cap is not None:
        logits_MV = scaling.cap * torch.tanh(logits_MV / scaling.cap)
    logits_MV = logits_MV / scaling.temperature
    if scaling.excluded:
        places = moved(torch.tensor(scaling.excluded), logits_MV.device)
        logits_MV = logits_MV.index_fill(1, places, NEVER)
    return logits_MV.log_softmax(-1)


def _mean_of_words(logprobs_MV: Tensor, scaling: Scaling) -> Tensor:
    """Average the logprobs over all words that can be generated, which gives (M,)."""
    words = logprobs_MV.shape[1] - len(scaling.excluded)
    if scaling.excluded:
        places = moved(torch.tensor(scaling.excluded), logprobs_MV.device)
        logprobs_MV = logprobs_MV.index_fill(1, places, 0.0)
    return logprobs_MV.sum(-1) / words


class _WideProduct(torch.autograd.Function):
    """The product h W^T in float32, whose gradients are those of a product in half precision."""

    @staticmethod
    def forward(ctx, hidden_MH, weight_VH):
        ctx.save_for_backward(hidden_MH, weight_VH)
        return torch.mm(hidden_MH, weight_VH.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, gradient_MV):
        hidden_MH, weight_VH = ctx.saved_tensors
        gradient_MV = gradient_MV.to(hidden_MH.dtype)
        d_hidden_MH = gradient_MV @ weight_VH if ctx.needs_input_grad[0] else None
        d_weight_VH = gradient_MV.T @ hidden_MH if ctx.needs_input_grad[1] else None
        return d_hidden_MH, d_weight_VH


class _KeptJacobian(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, scaling, tile):
        needs_gradient = ctx.needs_input_grad[0]
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        entropy_N = torch.empty_like(logprobs_N)
        jacobian_NH = torch.empty_like(hidden_NH) if needs_gradient else None
        for start in range(0, len(targets_N), tile.tokens):
            chunk = slice(start, start + tile.tokens)
            hidden_MH, targets_M = hidden_NH[chunk], targets_N[chunk]
            found = _online_softmax(hidden_MH, weight_VH, targets_M, scaling, tile.words)
            logprobs_N[chunk] = found.target_logits_M - found.lse_M
            entropy_N[chunk] = found.lse_M - found.mean_logits_M
            if jacobian_NH is not None:
                target_MH = weight_VH[targets_M] * found.target_slopes_M[:, None].to(weight_VH.dtype)
                jacobian_NH[chunk] = (target_MH - found.expected_MH) / scaling.temperature
        ctx.mark_non_differentiable(entropy_N)
        if jacobian_NH is not None:
            ctx.save_for_backward(jacobian_NH)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, gradient_N, _):
        (jacobian_NH,) = ctx.saved_tensors
        return (gradient_N[:, None] * jacobian_NH).to(jacobian_NH.dtype), None, None, None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SoftmaxSums:
    """Sums over the whole vocabulary for one chunk of tokens, fp32."""

    target_logits_M: Tensor
    target_slopes_M: Tensor  # slope of the cap; 1 without a cap
    lse_M: Tensor
    mean_logits_M: Tensor  # sum_v p_v z_v
    expected_MH: Tensor  # sum_v p_v W[v], each W[v] times its slope


def _online_softmax(
    hidden_MH: Tensor, weight_VH: Tensor, targets_M: Tensor, scaling: Scaling, words: int
) -> _SoftmaxSums:
    device, tokens = hidden_MH.device, len(targets_M)
    highest_M = torch.full((tokens,), 2 * NEVER, device=device)
    sum_M = torch.zeros(tokens, device=device)
    mean_M = torch.zeros(tokens, device=device)
    target_logits_M = torch.zeros(tokens, device=device)
    expected_MH = torch.zeros(tokens, hidden_MH.shape[1], device=device)
    tile = torch.empty(tokens * words, device=device)
    for start in range(0, weight_VH.shape[0], words):
        weight_WH = weight_VH[start : start + words]
        width = len(weight_WH)
        logits_MW = tile[: tokens * width].view(tokens, width)
        _logits_into(logits_MW, hidden_MH, weight_WH, scaling, start)
        place_M = targets_M - start
        is_here_M = (place_M >= 0) & (place_M < width)
        here_M = logits_MW.gather(1, place_M.clamp(0, width - 1)[:, None])[:, 0]
        target_logits_M = torch.where(is_here_M, here_M, target_logits_M)
        before_M, highest_M = highest_M, torch.maximum(highest_M, logits_MW.amax(-1))
        capped_MW = None if scaling.cap is None else logits_MW.clone()
        logits_MW.sub_(highest_M[:, None]).exp_()
        shrunk_M = (before_M - highest_M).exp()
        sum_M = sum_M * shrunk_M + logits_MW.sum(-1)
        if capped_MW is not None:
            mean_M = mean_M * shrunk_M + torch.linalg.vecdot(logits_MW, capped_MW)
            logits_MW *= _slopes(capped_MW, scaling)
        expected_MH *= shrunk_M[:, None]
        if weight_VH.dtype == torch.float32:
            expected_MH.addmm_(logits_MW, weight_WH)
        elif has_wide_product(probabilities_MW := logits_MW.to(weight_VH.dtype), weight_WH):
            expected_MH += torch.mm(probabilities_MW, weight_WH, out_dtype=torch.float32)
        else:
            expected_MH += probabilities_MW @ weight_WH
    expected_MH /= sum_M[:, None]
    if scaling.cap is None:
        mean_logits_M = torch.linalg.vecdot(expected_MH, hidden_MH.float()) / scaling.temperature
    else:
        mean_logits_M = mean_M / sum_M
    return _SoftmaxSums(
        target_logits_M=target_logits_M,
        target_slopes_M=_slopes(target_logits_M, scaling),
        lse_M=highest_M + sum_M.log(),
        mean_logits_M=mean_logits_M,
        expected_MH=expected_MH,
    )


def _slopes(logits: Tensor, scaling: Scaling) -> Tensor:
    """Compute how much a logit changes with its product, times the temperature: 1 - tanh^2, derived from the logit
    itself. It is 0 for a placeholder."""
    if scaling.cap is None:
        return torch.ones_like(logits)
    return (1 - (logits * (scaling.temperature / scaling.cap)) ** 2).clamp_min(0)


def _logits_into(out: Tensor, hidden_MH: Tensor, weight_WH: Tensor, scaling: Scaling, start: int) -> None:
    """Write the fp32 logits of the words from `start` on into `out`."""
    if weight_WH.dtype == torch.float32 and hidden_MH.dtype == torch.float32:
        torch.mm(hidden_MH, weight_WH.T, out=out)
    elif has_wide_product(hidden_MH, weight_WH):
        torch.mm(hidden_MH, weight_WH.T, out_dtype=torch.float32, out=out)
    else:
        out.copy_(hidden_MH @ weight_WH.T)
    if scaling.cap is not None:
        out.div_(scaling.cap).tanh_().mul_(scaling.cap)
    if scaling.temperature != 1:
        out /= scaling.temperature
    for word in scaling.excluded:
        if start <= word < start + out.shape[1]:
            out[:, word - start] = NEVER


@torch.no_grad()
def _squares(hidden_NH: Tensor, weight_VH: Tensor, scaling: Scaling, chunks: Sequence[slice]) -> Tensor:
    return torch.cat([(2 * _log_softmax(hidden_NH[chunk], weight_VH, scaling)).logsumexp(-1) for chunk in chunks])


def _divergence(
    hidden_NH: Tensor, weight_VH: Tensor, target: Target, scaling: Scaling, chunks: Sequence[slice]
) -> Tensor:
    def of_chunk(hidden_MH: Tensor, weight: Tensor, chunk: slice) -> Tensor:
        return target.of(_log_softmax(hidden_MH, weight, scaling), chunk)

    return divergence(hidden_NH, weight_VH, chunks, of_chunk)


def _recomputed(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    scaling: Scaling,
    chunks: Sequence[slice],
    options: PassOptions,
) -> tuple[Tensor, Tensor]:
    def scores(hidden_MH: Tensor, weight: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        logprobs_MV = _log_softmax(hidden_MH, weight, scaling)
        entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        logprobs_M = logprobs_MV.gather(1, targets_N[chunk, None])[:, 0]
        if options.smoothing:
            logprobs_M = (1 - options.smoothing) * logprobs_M + options.smoothing * _mean_of_words(logprobs_MV, scaling)
        return logprobs_M, entropy_M

    logprobs, entropies = zip(*recomputed(scores, hidden_NH, weight_VH, chunks), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
