"""Rewards in the trainer's own process."""

import asyncio

import pytest

from tests.rewards.samples import sample
from tiercel.config.schema import Reliability
from tiercel.rewards.runtime.in_process import InProcessReward, register_function


def test_an_async_function_has_one_loop_for_the_run_so_that_clients_keep_their_connections(tmp_path):
    loops = []
    room = asyncio.Semaphore(1)

    async def score(sample):
        async with room:  # belongs to the loop in which it was waited for first
            await asyncio.sleep(0.001)
        loops.append(asyncio.get_running_loop())
        return 1.0

    reward = InProcessReward(register_function(score, "score", tmp_path), Reliability())
    reward.start()
    for _ in range(2):
        assert [value.failure for value in reward.score([sample(), sample(id="row-2")])] == [None, None]
    reward.close()
    assert len(set(map(id, loops))) == 1 and loops[0].is_closed()


def test_what_was_not_given_to_this_process_is_an_error(tmp_path):
    from tiercel.errors import RecipeError

    with pytest.raises(RecipeError):
        InProcessReward("tiercel.rewards.runtime.in_process.run_0:gone", Reliability()).start()
