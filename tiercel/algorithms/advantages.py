"""Advantages of a group's completions from their rewards. G completions of one prompt."""

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-4


def group_norm(rewards_G: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-4), std with ddof 1 (DeepSeekMath 2024); exactly 0 where all rewards are equal.

    Raises ValueError for fewer than two rewards: the baseline of one completion is the completion itself.
    """
    if rewards_G.numel() < 2:
        raise ValueError("group_norm needs at least two rewards of the same prompt")
    if bool((rewards_G == rewards_G[0]).all()):
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(unbiased=True) + STD_EPSILON)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"group_norm": group_norm}
