"""Ratios of the policy's probability to the old policy's, by token or by completion.

N scored tokens of a microbatch, C its completions.
"""

from collections.abc import Callable

from torch import Tensor

from tiercel.algorithms import completions


def by_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Each token's own (PPO, 2017)."""
    return log_ratios_N.exp()


def by_sequence(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """The geometric mean of a completion's token ratios, at each of its tokens (GSPO 2025)."""
    return completions.means(log_ratios_N, completion_of_N, count).exp()[completion_of_N]


def by_sequence_at_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """The completion's ratio in value, with the gradient of the token's own (GSPO-token 2025)."""
    fixed_N = completions.means(log_ratios_N.detach(), completion_of_N, count)[completion_of_N]
    return (fixed_N + log_ratios_N - log_ratios_N.detach()).exp()


RATIOS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "token": by_token,
    "sequence": by_sequence,
    "sequence_at_token": by_sequence_at_token,
}
