"""The demo in which the question decides: sheets, questions and rows."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tiercel.demo.handwriting import Box
from tiercel.demo.questions import KINDS, ask
from tiercel.demo.results import before_after_control, by_kind, in_words
from tiercel.demo.sheet_rows import RowSet, write_questions
from tiercel.demo.sheets import CELL, SIDE, SQUARE, Digit, Sheet, Stationery
from tiercel.runs.records import GroupRecord, groups_path
from tiercel.runs.step_files import pack_step
from tools.demo.sheet_lessons import write_squares


@pytest.fixture(scope="module")
def stationery():
    return Stationery(is_held_out=False)


def digit(value: int, ink: str, box: Box) -> Digit:
    return Digit(value=value, ink=ink, box=box)


@pytest.fixture
def sheet():
    digits = (
        digit(3, "red", (4, 28, 20, 52)),
        digit(7, "blue", (28, 84, 44, 104)),
        digit(3, "red", (60, 0, 80, 28)),
        digit(5, "black", (84, 32, 104, 56)),
    )
    return Sheet(image=Image.new("RGB", (SIDE, SIDE)), digits=digits)


def test_a_sheet_has_two_to_four_digits_in_columns_of_their_own(stationery):
    generator = np.random.default_rng(0)
    sheets = [stationery.draw(generator) for _ in range(50)]
    assert {len(sheet.digits) for sheet in sheets} == {2, 3, 4}
    for sheet in sheets:
        columns = [digit.square[0] for digit in sheet.digits]
        assert columns == sorted(set(columns))
        for x1, y1, x2, y2 in (digit.box for digit in sheet.digits):
            assert x1 // SQUARE == (x2 - 1) // SQUARE and y1 // SQUARE == (y2 - 1) // SQUARE
            assert all(edge % CELL == 0 for edge in (x1, y1, x2, y2))


def test_held_out_sheets_show_other_handwriting(stationery):
    other = Stationery(is_held_out=True)
    seen = {strokes.tobytes() for strokes in stationery.strokes}
    assert len(stationery.strokes) + len(other.strokes) == 1797
    assert sum(strokes.tobytes() in seen for strokes in other.strokes) == 0


def test_a_thought_goes_from_left_to_right(sheet):
    notes = {kind: {text: each.notes for text, each in KINDS[kind](sheet).items()} for kind in KINDS}
    thought = sheet.read_out(notes["where"]["Where is the 7?"])
    assert thought == "1,2 red 3: no; 2,4 blue 7: here; 3,1 red 3: no; 4,2 black 5: no"
    assert notes["count"]["How many 3s?"] == ["1", "no", "2", "no"]
    assert notes["sum"]["What is the sum of the red ones?"] == ["3", "no", "3+3=6", "no"]
    assert notes["left"]["Which digit is left of the 5?"] == ["no", "no", "no", "3"]


def test_a_zero_that_is_asked_for_is_no_other_digit():
    zeros = tuple(digit(0, "red", (28 * column, 0, 28 * column + 20, 20)) for column in range(2))
    known = KINDS["sum"](Sheet(image=Image.new("RGB", (SIDE, SIDE)), digits=zeros))
    assert known["What is the sum of the red ones?"].notes == ["0", "0+0=0"]


def test_each_kind_asks_what_has_one_answer(sheet):
    known = {kind: {text: each.answer for text, each in KINDS[kind](sheet).items()} for kind in KINDS}
    assert known["where"] == {"Where is the 7?": "2,4", "Where is the 5?": "4,2"}
    counts = [known["count"][f"How many {value}s?"] for value in (3, 7, 1)]
    assert counts == ["2", "1", "0"]
    assert known["sum"] == {
        "What is the sum of the red ones?": "6",
        "What is the sum of the blue ones?": "7",
        "What is the sum of the black ones?": "5",
    }
    assert known["left"] == {"Which digit is left of the 7?": "3", "Which digit is left of the 5?": "3"}


def test_the_swapped_question_has_another_answer(stationery):
    generator = np.random.default_rng(1)
    asked = Counter()
    for _ in range(60):
        drawn = stationery.draw(generator)
        for kind, answers in KINDS.items():
            question = ask(drawn, kind, generator)
            if question is not None:
                asked[kind] += 1
                known = answers(drawn)
                assert known[question.text] == question.solution
                assert known[question.swapped].answer != question.solution.answer
    assert set(asked) == set(KINDS)


def test_a_sheet_without_two_answers_is_not_asked_about(sheet):
    one_ink = Sheet(image=sheet.image, digits=sheet.digits[:1])
    assert ask(one_ink, "sum", np.random.default_rng(0)) is None
    assert ask(sheet, "left", np.random.default_rng(0)) is None  # both answers are 3


def test_rows_ask_swap_and_answer_in_turns(tmp_path):
    write_questions(tmp_path, RowSet(name="some", count=8, seed=5, is_held_out=True))
    rows, swapped = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("some", "some-swapped")
    )
    assert [row["kind"] for row in rows] == [*KINDS, *KINDS]
    for row, other in zip(rows, swapped, strict=True):
        assert row["images"] == other["images"] and row["answer"] == other["answer"]
        assert row["messages"][0] != other["messages"][0]
        assert len(other["messages"]) == 1
        _, said = row["messages"][1]["content"].split("</think>")
        assert said == row["answer"]


def test_careless_rows_keep_the_right_answer_in_its_column(tmp_path):
    write_questions(tmp_path, RowSet(name="some", count=40, seed=5, slips=0.5))
    rows = [json.loads(line) for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    said = [row["messages"][1]["content"].split("</think>")[1] for row in rows]
    wrong = [(row["kind"], row["answer"], text) for row, text in zip(rows, said, strict=True) if text != row["answer"]]
    assert 10 < len(wrong) < 30
    for kind, answer, text in wrong:
        if kind == "where":
            assert text == answer[::-1]
        if kind in ("count", "sum"):
            assert int(text) == int(answer) + 1


def test_lessons_end_with_the_thought(tmp_path):
    write_questions(tmp_path, RowSet(name="some", count=4, seed=5, is_answered=False))
    said = [json.loads(line)["messages"][1]["content"] for line in (tmp_path / "some.jsonl").read_text().splitlines()]
    assert all(text.startswith("<think>") and text.endswith("</think>") for text in said)
    assert not (tmp_path / "some-swapped.jsonl").exists()


def test_a_square_is_named_and_compared_with_a_question(tmp_path):
    write_squares(tmp_path, RowSet(name="some", count=12, seed=5))
    named, noted = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("some", "asked-some")
    )
    assert len(named) == len(noted) == 12
    assert Image.open(tmp_path / named[0]["images"][0]).size == (SQUARE, SQUARE)
    said = Counter()
    for plain, row in zip(named, noted, strict=True):
        assert row["images"] == plain["images"]
        _, ink, value = plain["messages"][1]["content"].split()
        question, thought = (message["content"] for message in row["messages"])
        is_asked_for = f"the {value}?" in question or f"many {value}s" in question or f"the {ink} ones" in question
        expected = {"Where": "here", "How": "1", "What": value}[question.removeprefix("<image>").split()[0]]
        assert thought == f"<think>1,1 {ink} {value}: {expected if is_asked_for else 'no'}</think>"
        said[is_asked_for] += 1
    assert said[True] > 2 and said[False] > 2


def record(name: str, correct: bool) -> dict:
    completion = {
        "text": "", "tokens": 1, "token_ids": [1], "seed": 0, "truncated": False, "rewards": {}, "failures": {},
        "total": 0.0, "correct": correct, "advantage": None,
    }  # fmt: skip
    return {
        "id": name, "index": 0, "policy_version": 0, "prompt": "", "question": "", "answer": "", "images": [],
        "completions": [completion],
    }  # fmt: skip


def test_accuracy_is_counted_by_the_kind_in_the_id():
    named = (("heldout-sum-0", True), ("heldout-sum-4", False), ("heldout-left-3", True))
    groups = [GroupRecord.from_json(record(*each)) for each in named]
    assert by_kind(groups) == {"sum": (1, 2), "left": (1, 1), "all": (2, 3)}
    assert in_words({"sum": (50, 100)}, "sum") == "0.500 (0.404 to 0.596)"


def test_the_evaluation_from_before_a_long_run_is_read_though_it_was_compressed(tmp_path):
    control = tmp_path / "control.jsonl"
    (tmp_path / "evaluations").mkdir()
    for step, correct in ((0, False), (250, True)):
        groups_path(tmp_path, "evaluations", step).write_text(json.dumps(record("heldout-sum-0", correct)) + "\n")
    control.write_text(json.dumps(record("heldout-sum-0", False)) + "\n")
    metrics = [{"step": 0, "eval/accuracy": 0.0}, {"step": 250, "eval/accuracy": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    pack_step(tmp_path, 0)
    assert not groups_path(tmp_path, "evaluations", 0).exists()
    before, after, other = (counts["all"] for counts in before_after_control(tmp_path, control))
    assert (before, after, other) == ((0, 1), (1, 1), (0, 1))
