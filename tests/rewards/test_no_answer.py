"""What is not an answer: a thought that the chat template opened, and a call of a tool at which a trajectory ended."""

from dataclasses import replace

import pytest

from tests.rewards.samples import reward, sample
from tiercel.reward_types import PolicyTurn, ToolCall
from tiercel.rewards.runtime.mathematics import score as math_score

GUESSES = {
    "exact": ("7", "7", {}),
    "normalised": ("7", "7", {}),
    "ocr": ("7", "7", {}),
    "number": ("maybe 3 + 4 = 7", 7, {}),
    "count": ("maybe 3 + 4 = 7", 7, {}),
    "choice": ("it must be B", "B", {}),
    "json": ('{"a": 1}', '{"a": 1}', {}),
    "iou": ("[0, 0, 400, 50]", [0, 0, 200, 100], {}),
    "point_in_box": ("[10, 10]", [0, 0, 200, 100], {}),
}


@pytest.mark.parametrize("name", GUESSES)
def test_a_guess_in_a_thought_that_was_cut_off_is_no_answer(name):
    text, answer, options = GUESSES[name]
    scored = reward(name=name, **options).score
    assert scored(sample(text, answer)) == 1.0
    assert scored(sample(text, answer, opened="<think>\n")) == 0.0
    assert scored(sample(f"so\n</think>{text}", answer, opened="<think>\n")) == 1.0


def test_the_reward_math_reads_no_thought_either():
    assert math_score(sample("so 3 + 4 = 7", "7")) == 1.0
    assert math_score(sample("so 3 + 4 = 7", "7", opened="<think>\n")) == 0.0


ZOOM = '<tool_call>{"name": "zoom", "arguments": {"box": [0, 0, 400, 50]}}</tool_call>'


@pytest.mark.parametrize(
    "text, calls", [(ZOOM, (ToolCall(name="zoom", arguments={}),)), (ZOOM.removesuffix("}</tool_call>"), ())]
)
def test_a_call_at_which_the_turns_ran_out_is_no_answer(text, calls):
    iou = reward(name="iou")
    called = replace(sample(text, [0, 0, 200, 100]), turns=(PolicyTurn(text=text, token_count=9, calls=calls),))
    assert iou.score(called) == 1.0  # the environment ended the trajectory with this call
    assert iou.score(replace(called, is_truncated=True)) == 0.0
    assert iou.score(replace(called, completion="[0, 0, 400, 50]", is_truncated=True, turns=())) == 1.0
