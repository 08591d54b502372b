"""The choice of the tokens that the policy term learns from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def entropy_threshold(entropies: Tensor, share: float) -> float:
    """Find the entropy that `share` of the tokens reach: the k-th largest of n, k = ceil(share x n); 0 without tokens.

    Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement learning".
    """
    if not len(entropies):
        return 0.0
    kept = math.ceil(share * len(entropies))
    return float(entropies.kthvalue(len(entropies) - kept + 1).values)
