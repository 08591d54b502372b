"""Draws that depend on nothing but the logits and (seed, position, token id).

Each token's noise is a hash of those three (Salmon et al. 2011, counter-based random numbers); the drawn token is the
argmax of logits plus Gumbel noise (Gumbel 1954), computed as a race. So neither the neighbours in a batch nor the rank
nor the order of the calls matters. Shape suffixes: R rows being decoded, V vocabulary.
"""

from functools import cache

import torch
from torch import Tensor

ELEMENTS_IN_CACHE = 2**17

_MASK = (1 << 64) - 1
_LAST_FACTOR = 0x846CA68B - (1 << 32)  # of lowbias32 (Wellons 2018)
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the finaliser of splitmix64 (Steele et al. 2014)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mix(value: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, with wrap-around and logical shifts."""
    value = (value ^ _shifted(value, 30)) * _signed(_MULTIPLIERS[0])
    value = (value ^ _shifted(value, 27)) * _signed(_MULTIPLIERS[1])
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def sampling_seed(run_seed: int, index: int) -> int:
    """Seed of the first sample of the prompt at `index` in the global order; sample i adds i. Below 2**48."""
    key = torch.tensor([_signed((run_seed * 0x9E3779B97F4A7C15 + index) & _MASK)])
    return int(_shifted(_mix(_mix(key) + 1), 16))


def race(weights_RV: Tensor, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """int64 (R,): one token drawn from each row, with probability proportional to its weight.

    The largest weight over Exp(1) noise wins, which is the argmax of log weight plus Gumbel noise (-log of that noise)
    with one logarithm less for every token.
    """
    rows, vocabulary = weights_RV.shape
    best_R = torch.full((rows,), -1.0, device=weights_RV.device)
    drawn_R = torch.zeros(rows, dtype=torch.int64, device=weights_RV.device)
    noise = _Noise(seeds_R, positions_R, vocabulary)
    width = _block_width(rows, weights_RV.device)
    for start in range(0, vocabulary, width):
        block = slice(start, min(start + width, vocabulary))
        score_R, place_R = torch.div(weights_RV[:, block], noise.of(block)).max(-1)
        is_better_R = score_R > best_R
        best_R = torch.where(is_better_R, score_R, best_R)
        drawn_R = torch.where(is_better_R, place_R + start, drawn_R)
    return drawn_R


class _Noise:
    """Exp(1) noise of some rows, by blocks of the vocabulary. Within a row the hash is one to one, so no two tokens
    share theirs; 32-bit words, since that is what processors multiply many at a time."""

    def __init__(self, seeds_R: Tensor, positions_R: Tensor, vocabulary: int):
        row_keys_R1 = _mix(_mix(seeds_R) + positions_R)[:, None]
        self.added_R1 = _low_word(row_keys_R1)
        self.factor_R1 = _low_word(row_keys_R1 >> 32) | 1
        self.token_keys_V = _token_keys(vocabulary, seeds_R.device)

    def of(self, block: slice) -> Tensor:
        """fp32 (R, width of the block)."""
        bits = self.token_keys_V[block] ^ self.added_R1
        bits *= self.factor_R1
        bits = _shifted_into(bits, 15).mul_(_LAST_FACTOR)
        bits >>= 1
        bits &= 0x7FFFFFFF
        # Small u decides who wins, and there float32 is fine-grained: -log(1 - u).
        u = bits.float().add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
        return u.log1p_().neg_()


@cache
def _token_keys(vocabulary: int, device: torch.device) -> Tensor:
    """int32 (V,): murmur3's finaliser (Appleby 2011) of each token's number, one to one."""
    keys_V = torch.arange(1, vocabulary + 1, dtype=torch.int32, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        keys_V = _shifted_into(keys_V, shift).mul_(factor - (1 << 32))
    return _shifted_into(keys_V, 16)


def _shifted_into(words: Tensor, bits: int) -> Tensor:
    """words ^ (words >>> bits) on int32, in place."""
    return words.bitwise_xor_((words >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _low_word(value: Tensor) -> Tensor:
    """The low 32 bits of int64, as int32."""
    low = value & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _block_width(rows: int, device: torch.device) -> int:
    """On CPU a block's words stay in the caches; elsewhere few launches count."""
    return max(1, ELEMENTS_IN_CACHE // rows) if device.type == "cpu" else 2**30


def filtered(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with all but the k likeliest, and all outside the nucleus (Holtzman et al. 2020), at minus infinity."""
    if 0 < top_k < logits_RV.shape[-1]:
        kth_R1 = logits_RV.topk(top_k).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < kth_R1, -torch.inf)
    if top_p < 1:
        ordered_RV, order_RV = logits_RV.sort(descending=True)
        before_RV = ordered_RV.softmax(-1).cumsum(-1) - ordered_RV.softmax(-1)
        outside_RV = torch.zeros_like(logits_RV, dtype=torch.bool).scatter(1, order_RV, before_RV >= top_p)
        logits_RV = logits_RV.masked_fill(outside_RV, -torch.inf)
    return logits_RV
