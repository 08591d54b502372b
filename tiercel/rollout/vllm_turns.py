"""Turns of trajectories that vLLM samples: each is a request of its own, whose prompt is all that came before it. The
prefix cache of vLLM has its keys and values."""

from concurrent.futures import Future
from dataclasses import replace

from tiercel.rollout.dialogue import Reply
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.trajectory import TrajectoryBuilder
from tiercel.types import Completion


def turn_params(params: SamplingParams, builder: TrajectoryBuilder) -> SamplingParams:
    """Return the parameters of the next turn."""
    least = min(params.min_new_tokens, builder.budget)
    return replace(params, group_size=1, min_new_tokens=least, max_new_tokens=builder.budget)


def turn_seed(builder: TrajectoryBuilder) -> int:
    """Return the seed of the next turn: that of the sample for the first, a function of both for others."""
    turn = len(builder.turns)
    return builder.seed if turn == 0 else sampling_seed(builder.seed, turn)


def add_sampled(builder: TrajectoryBuilder, turn: Completion) -> "Future[Reply] | None":
    """Add what vLLM sampled. Returns what the reply will be; None where the trajectory has ended."""
    return builder.add_turn(turn.token_ids_L.tolist(), turn.logprobs_L.tolist(), is_truncated=turn.is_truncated)
