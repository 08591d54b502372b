"""Captions of rollouts."""

from tests.web.report.fake_runs import completion, group, turn
from tiercel.runs.records import GroupRecord
from tiercel.trackers.pictures import caption


def caption_of(turns: list[dict]) -> str:
    made = completion("Seven.", {"exact": 1.0}, True, turns=turns)
    record = GroupRecord.from_json(group("a", "How many?", "7", [], [made]))
    return caption(record, record.completions[0])


def test_a_completion_of_one_turn_is_its_text():
    assert caption_of([]) == "prompt: How many?\ncompletion: Seven.\nreward: 1"


def test_turns_are_told_in_order_each_at_its_own_length():
    said = caption_of([turn("x" * 400, answer="image 2<image>"), turn("Seven.")])
    assert said == f"prompt: How many?\nturn 1: {'x' * 297}...\nturn 2: Seven.\nreward: 1"
