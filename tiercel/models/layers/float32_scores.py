"""Products of half-precision tensors whose results are in float32, the dtype of their sums. Rounded to bfloat16,
numbers between 16 and 32 would be multiples of 0.125."""

import torch
from torch import Tensor

WIDE_DEVICES = {"cuda"}  # on these, PyTorch's products have `out_dtype`
HALF = {torch.bfloat16, torch.float16}


def has_wide_product(left: Tensor, right: Tensor) -> bool:
    """Return whether PyTorch can keep the product of two half-precision tensors in float32."""
    return left.device.type in WIDE_DEVICES and left.dtype == right.dtype and left.dtype in HALF


def wide_scores(query: Tensor, key: Tensor) -> Tensor:
    """Compute the product of queries (R, J, M, E) and keys (R, J, T, E), fp32 (R, J, M, T)."""
    if not has_wide_product(query, key):
        return query.float() @ key.float().mT
    product = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).mT, out_dtype=torch.float32)
    return product.unflatten(0, query.shape[:2])
