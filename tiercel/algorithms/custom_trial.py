"""A trial of the user's own loss and advantage on made-up numbers before a run."""

from collections.abc import Iterator

import torch

from tiercel.algorithms.advantages import advantages
from tiercel.algorithms.custom import ADVANTAGE_KEY, LOSS_KEY
from tiercel.algorithms.policy_loss import policy_loss
from tiercel.algorithms.section import Algorithm, own_calls
from tiercel.algorithms.types import LossInput, Options, RewardTable, Totals


def try_own_functions(algorithm: Algorithm, *, group_size: int, rewards: int) -> Iterator[str]:
    """Call each of the user's own functions on two made-up groups, and yield a line about each. Raises RecipeError if
    one cannot be loaded, and TrainingError if one fails."""
    calls = own_calls(algorithm)
    if LOSS_KEY in calls:
        policy_loss(_made_up_batch(algorithm, 2 * group_size), algorithm).loss.backward()
        yield f"{LOSS_KEY}: {calls[LOSS_KEY]} takes made-up tokens"
    if ADVANTAGE_KEY in calls:
        options = Options(scale=algorithm.scale, pass_k=algorithm.pass_k, clip=algorithm.advantage_clip)
        advantages(_made_up_table(group_size, rewards), algorithm.advantage, options)
        yield f"{ADVANTAGE_KEY}: {calls[ADVANTAGE_KEY]} takes made-up rewards"


def _made_up_batch(algorithm: Algorithm, count: int) -> LossInput:
    """Build completions of one to three tokens, with the terms that the recipe adds to the loss."""
    completion_of_N = torch.arange(count).repeat_interleave(1 + torch.arange(count) % 3)
    tokens = len(completion_of_N)
    logprobs_N = torch.linspace(-3.0, -0.1, tokens).requires_grad_()
    return LossInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=logprobs_N.detach() - 0.1,
        kl_N=0.1 * logprobs_N.square() if algorithm.kl.coef > 0 and algorithm.kl.place == "loss" else None,
        entropy_N=-logprobs_N if algorithm.entropy_coef > 0 else None,
        advantages_C=torch.linspace(-1.0, 1.0, count),
        completion_of_N=completion_of_N,
        totals=Totals(tokens=tokens, completions=count, groups=2),
        longest=3,
    )


def _made_up_table(group_size: int, rewards: int) -> RewardTable:
    """Build groups whose first completion is correct."""
    is_correct_C = torch.arange(2 * group_size) % group_size == 0
    rewards_CF = is_correct_C.float()[:, None].expand(-1, rewards)
    return RewardTable(
        totals_C=rewards_CF.sum(1),
        group_of_C=torch.arange(2).repeat_interleave(group_size),
        rewards_CF=rewards_CF,
        weights_F=torch.ones(rewards),
        is_correct_C=is_correct_C,
    )
