"""Drawing of tokens with noise that depends only on (seed, position, token id).

Each token's noise is a hash of these three (Salmon et al. 2011, counter-based random numbers). The drawn token is the
argmax of logits plus Gumbel noise (Gumbel 1954), computed as a race. So the other rows of the batch, the rank and the
order of the calls do not matter. Shape suffixes: docs/shapes.md.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.families.base import Family
from tiercel.packing.compiling import CompiledFunction
from tiercel.rollout.sampler import SamplingParams

ELEMENTS_IN_CACHE = 2**17

_MASK = (1 << 64) - 1
_LAST_FACTOR = 0x846CA68B - (1 << 32)  # of lowbias32 (Wellons 2018)
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64 (Steele et al. 2014)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: Tensor) -> Tensor:
    """Compute the finaliser of splitmix64 on int64, with wrap-around and logical shifts."""
    value = (value ^ _shifted(value, 30)) * _signed(_MULTIPLIERS[0])
    value = (value ^ _shifted(value, 27)) * _signed(_MULTIPLIERS[1])
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def sampling_seed(run_seed: int, index: int) -> int:
    """Compute the seed of the first sample of the prompt at `index` in the global order, below 2**48. The seed of
    sample i is i larger."""
    key = torch.tensor([_signed((run_seed * 0x9E3779B97F4A7C15 + index) & _MASK)])
    return int(_shifted(_mix(_mix(key) + 1), 16))


class Vocabulary(NamedTuple):
    """What a draw needs to know about the tokens of a model."""

    placeholder_ids: Tensor
    end_ids: Tensor
    keys_V: Tensor  # of the noise


class TokenDraw:
    """The draw of the next token of every row. What it needs on the device is made once, so that no draw waits for it.
    `backend` compiles it, so that the noise of a token is never in memory; None: it is not compiled."""

    def __init__(
        self, params: SamplingParams, family: Family, vocabulary: int, device: torch.device, backend: Any = None
    ):
        self.params = params
        placeholders = [i for i in family.placeholder_ids if i < vocabulary]
        self.vocabulary = Vocabulary(
            placeholder_ids=moved(torch.tensor(placeholders, dtype=torch.int64), device),
            end_ids=moved(torch.tensor(family.checkpoint.end_token_ids), device),
            keys_V=token_keys(vocabulary, device),
        )
        self.drawn = _drawn if backend is None else _compiled(backend)

    def __call__(
        self, logits_RV: Tensor, seeds_R: Tensor, positions_R: Tensor, is_early_R: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw a token in each row. `positions_R` is its place in the completion. `is_early_R` says whether it must not
        end the turn; None: all may. Returns tokens (R,) and their logprobs (R,) under log-softmax(logits / temperature)
        without vision placeholders."""
        return self.drawn(self.params, self.vocabulary, logits_RV, seeds_R, positions_R, is_early_R)

    def ends(self, token_ids_R: Tensor) -> Tensor:
        """Return for each token whether it ends a completion."""
        return (token_ids_R[:, None] == self.vocabulary.end_ids).any(1)


def _drawn(
    params: SamplingParams,
    vocabulary: Vocabulary,
    logits_RV: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    is_early_R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    logits_RV = logits_RV.float()
    if params.temperature != 1:
        logits_RV = logits_RV / params.temperature
    logits_RV.index_fill_(1, vocabulary.placeholder_ids, -torch.inf)
    ends_lse_R = None
    if is_early_R is not None:
        ends = logits_RV[:, vocabulary.end_ids]
        ends_lse_R = ends.logsumexp(-1).masked_fill(~is_early_R, -torch.inf)
        logits_RV.index_copy_(1, vocabulary.end_ids, ends.masked_fill(is_early_R[:, None], -torch.inf))
    highest_R1 = logits_RV.amax(-1, keepdim=True)
    weights_RV = (logits_RV - highest_R1).exp_()
    lse_R = highest_R1[:, 0] + weights_RV.sum(-1).log()
    if ends_lse_R is not None:
        lse_R = torch.logaddexp(lse_R, ends_lse_R)
    if params.greedy:
        drawn_R = logits_RV.argmax(-1)
    else:
        if params.top_k or params.top_p < 1:
            weights_RV = weights_RV.masked_fill(filtered(logits_RV, params.top_k, params.top_p).isneginf(), 0.0)
        drawn_R = race(weights_RV, seeds_R, positions_R, vocabulary.keys_V)
    return drawn_R, logits_RV.gather(1, drawn_R[:, None])[:, 0] - lse_R


@cache
def _compiled(backend: Any) -> CompiledFunction:
    return CompiledFunction(_drawn, backend, "the drawing of tokens")


def race(weights_RV: Tensor, seeds_R: Tensor, positions_R: Tensor, token_keys_V: Tensor) -> Tensor:
    """Draw one token from each row, with probability proportional to its weight. Returns int64 (R,).

    The token with the largest weight / noise wins, where the noise is Exp(1). This is the argmax of log weight plus
    Gumbel noise (-log of that noise), with one logarithm less for every token.
    """
    rows, vocabulary = weights_RV.shape
    best_R = torch.full((rows,), -1.0, device=weights_RV.device)
    drawn_R = torch.zeros(rows, dtype=torch.int64, device=weights_RV.device)
    noise = _Noise(seeds_R, positions_R, token_keys_V)
    width = _block_width(rows, weights_RV.device)
    for start in range(0, vocabulary, width):
        block = slice(start, min(start + width, vocabulary))
        score_R, place_R = torch.div(weights_RV[:, block], noise.of(block)).max(-1)
        is_better_R = score_R > best_R
        best_R = torch.where(is_better_R, score_R, best_R)
        drawn_R = torch.where(is_better_R, place_R + start, drawn_R)
    return drawn_R


class _Noise:
    """The Exp(1) noise of some rows, for a block of the vocabulary at a time. Within a row the hash is one to one, so
    no two tokens have the same. It uses 32-bit words, because processors multiply many of these at a time."""

    def __init__(self, seeds_R: Tensor, positions_R: Tensor, token_keys_V: Tensor):
        row_keys_R1 = _mix(_mix(seeds_R) + positions_R)[:, None]
        self.added_R1 = _low_word(row_keys_R1)
        self.factor_R1 = _low_word(row_keys_R1 >> 32) | 1
        self.token_keys_V = token_keys_V

    def of(self, block: slice) -> Tensor:
        """Return the noise of a block of the vocabulary, fp32 (R, width of the block)."""
        bits = self.token_keys_V[block] ^ self.added_R1
        bits *= self.factor_R1
        bits = _shifted_into(bits, 15).mul_(_LAST_FACTOR)
        bits >>= 1
        bits &= 0x7FFFFFFF
        # Small u decides which token wins. -log(1 - u) keeps the precision that float32 has there.
        u = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
        return u.log1p_().neg_()


@cache
def token_keys(vocabulary: int, device: torch.device) -> Tensor:
    """Compute the finaliser of murmur3 (Appleby 2011) of each token's number, one to one, int32 (V,)."""
    keys_V = torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        keys_V = _shifted_into(keys_V, shift).mul_(factor - (1 << 32))
    return _shifted_into(keys_V, 16)


def _shifted_into(words: Tensor, bits: int) -> Tensor:
    """Compute words ^ (words >>> bits) on int32, in place."""
    return words.bitwise_xor_((words >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _low_word(value: Tensor) -> Tensor:
    """Return the low 32 bits of int64, as int32."""
    low = value & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _block_width(rows: int, device: torch.device) -> int:
    """Return how many words a block has. On CPU a block fits into the caches; on GPU one block saves launches."""
    return max(1, ELEMENTS_IN_CACHE // rows) if device.type == "cpu" else 2**30


def filtered(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits (R, V) to minus infinity, except those of the `top_k` likeliest tokens (0: all), and those in the
    nucleus of `top_p` (Holtzman et al. 2020)."""
    if 0 < top_k < logits_RV.shape[-1]:
        kth_R1 = logits_RV.topk(top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < kth_R1, -torch.inf)
    if top_p < 1:
        ordered_RV, order_RV = logits_RV.sort(descending=True)
        before_RV = ordered_RV.softmax(-1).cumsum(-1) - ordered_RV.softmax(-1)
        outside_RV = torch.zeros_like(logits_RV, dtype=torch.bool).scatter(1, order_RV, before_RV >= top_p)
        logits_RV = logits_RV.masked_fill(outside_RV, -torch.inf)
    return logits_RV
