"""A group with a trajectory, made by hand."""

from dataclasses import replace

import torch

from tests.rewards.samples import group
from tiercel.reward_types import PolicyTurn, RewardValue, SampleImage, ToolCall
from tiercel.types import Completion, EncodedImage, Group, ImagePlan, Trajectory

SHOWN = SampleImage(path=None, original_size=(20, 10), processed_size=(40, 20))
TURNS = (
    PolicyTurn(
        text="Look.",
        token_count=2,
        calls=(
            ToolCall(name="zoom", arguments={"box": [1, 2, 3, 4]}),
            ToolCall(name="peek", arguments={}, failure="there is no tool peek", is_known=False),
        ),
        answer="<image>there",
        images=(SHOWN,),
    ),
    PolicyTurn(text="Seven.", token_count=3),
)


def picture() -> EncodedImage:
    plan = ImagePlan(original_size=(20, 10), processed_size=(40, 20), grid=(1, 2, 2), token_count=4)
    return EncodedImage(sha256="b" * 64, plan=plan, views=(torch.zeros(20, 40, 3, dtype=torch.uint8),))


def trajectory_group(outcome: RewardValue | None = None, failure: str | None = None) -> Group:
    """Return a group with two turns of 2 and 3 tokens, and 4 observed tokens between them."""
    trajectory = Trajectory(
        is_sampled_L=torch.tensor([True] * 2 + [False] * 4 + [True] * 3),
        positions_DL=torch.arange(9)[None] + 5,
        images=(picture(),),
        picture_spans=(),
        turns=TURNS,
        outcome=outcome,
        failure=failure,
    )
    completion = Completion(
        token_ids_L=torch.arange(9),
        logprobs_L=torch.tensor([-1.0, -2.0, 0.0, 0.0, 0.0, 0.0, -3.0, -4.0, -5.0]),
        text="Seven.",
        is_truncated=False,
        seed=3,
        trajectory=trajectory,
    )
    return replace(group("Seven."), completions=(completion,))
