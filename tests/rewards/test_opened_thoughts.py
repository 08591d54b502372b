"""A thought that the chat template opened is not the answer, if the completion ends within it."""

import pytest

from tests.rewards.samples import reward, sample
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
