"""The one form of a line of rollouts/ and evaluations/."""

import json
from dataclasses import replace

import pytest

from tiercel.runs.files import json_line
from tiercel.runs.records import CompletionRecord, GroupRecord, ImageRecord, finite, groups_path

LINE = (
    '{"coordinate_space": "thousandths", "id": "rec-17", "index": 3, "policy_version": 2, "prompt": "<user>", '
    '"question": "Wo ist die 7?", "answer": [1, 2, 3, 4], "images": [{"sha256": "' + "a" * 64 + '", "path": null, '
    '"original_size": [200, 100], "processed_size": [56, 28]}], "completions": [{"text": "ä", "tokens": 2, '
    '"token_ids": [5, 6], "seed": 9, "truncated": true, "rewards": {"iou": 0.5, "mine": null}, '
    '"failures": {"mine": "timed out"}, "total": 0.5, "correct": null, "advantage": -1.0}]}\n'
)
RECORD = GroupRecord(
    coordinate_space="thousandths",
    id="rec-17",
    index=3,
    policy_version=2,
    prompt="<user>",
    question="Wo ist die 7?",
    answer=[1, 2, 3, 4],
    images=(ImageRecord(sha256="a" * 64, path=None, original_size=(200, 100), processed_size=(56, 28)),),
    completions=(
        CompletionRecord(
            text="ä",
            tokens=2,
            token_ids=(5, 6),
            seed=9,
            is_truncated=True,
            rewards={"iou": 0.5, "mine": None},
            failures={"mine": "timed out"},
            total=0.5,
            is_correct=None,
            advantage=-1.0,
        ),
    ),
)


def test_a_record_is_written_byte_for_byte():
    assert json_line(RECORD.as_json()) == LINE


def test_a_line_is_read_back_as_the_record():
    assert GroupRecord.from_json(json.loads(LINE)) == RECORD


@pytest.mark.parametrize("key", [key for key in json.loads(LINE) if key != "coordinate_space"])
def test_a_line_that_lacks_a_field_is_refused(key):
    fields = json.loads(LINE)
    del fields[key]
    with pytest.raises(ValueError, match=key):
        GroupRecord.from_json(fields)


def test_a_line_without_a_known_coordinate_space_says_none():
    fields = {**json.loads(LINE), "coordinate_space": "furlongs"}
    assert GroupRecord.from_json(fields) == replace(RECORD, coordinate_space=None)


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (0.5, 0.5), (True, None), ("3", None), (float("nan"), None), (float("inf"), None), (10**400, None)],
)
def test_only_finite_numbers_are_numbers(value, number):
    assert finite(value) == number


def test_groups_of_a_step_have_a_file(tmp_path):
    assert groups_path(tmp_path, "evaluations", 7) == tmp_path / "evaluations" / "step-000007.jsonl"
