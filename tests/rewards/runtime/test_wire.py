"""Samples on their way to another process."""

import json

from tests.trajectories import trajectory_group
from tiercel.reward_types import RewardValue
from tiercel.rewards.runtime.scorer import make_sample
from tiercel.rewards.runtime.wire import decode_sample, encode_sample


def test_turns_and_the_environments_reward_arrive_as_they_were():
    group = trajectory_group(outcome=RewardValue(value=0.25))
    sample = make_sample(group.prompt, group.completions[0], "thousandths")
    assert decode_sample(json.loads(encode_sample(sample))) == sample
