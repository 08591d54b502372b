"""Draws that depend on nothing but the logits and (seed, position, token id).

Each token's Gumbel noise is a hash of those three (Salmon et al. 2011, counter-based random numbers); the drawn
token is the argmax of logits plus noise (Gumbel 1954). So neither the neighbours in a batch nor the rank nor the
order of the calls matters. Shape suffixes: R rows being decoded, V vocabulary.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
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


def gumbel_noise(seeds_R: Tensor, positions_R: Tensor, vocabulary: int) -> Tensor:
    """fp32 (R, V) of standard Gumbel noise."""
    row_keys_R = _mix(_mix(seeds_R) + positions_R)
    token_keys_V = _mix(torch.arange(1, vocabulary + 1, device=seeds_R.device))
    bits_RV = _shifted(_mix(row_keys_R[:, None] ^ token_keys_V), 32)
    # Small u decides who wins, and there float32 is fine-grained: -log(-log(1 - u)).
    u_RV = ((bits_RV.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u_RV))


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
