"""The rows that each reward applies to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rewards.samples import reward
from tiercel.config.data import Data
from tiercel.data.coverage import reward_coverage, rows_with_rewards, run_coverage
from tiercel.data.reading import read_rows
from tiercel.data.row_table import RunRows
from tiercel.errors import DataError

TURNS = [{"role": "user", "content": "How many?"}]


def rows_of(tmp_path: Path, *records: dict) -> RunRows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": TURNS, **record}) + "\n" for record in records))
    return RunRows(train=read_rows(str(file), Data(train=str(file), format="tiercel"), "grpo"), heldout=None)


def fault(rows: RunRows, **keys) -> str:
    with pytest.raises(DataError) as caught:
        run_coverage([reward(**keys)], rows)
    return str(caught.value)


def test_rewards_that_apply_to_every_row_are_not_told(tmp_path):
    rows = rows_of(tmp_path, {"answer": "7"}, {"answer": 0})
    assert run_coverage([reward(name="exact"), reward(name="length", max_tokens=4), reward(call="a.py:f")], rows) == []


def test_a_reward_that_applies_to_few_rows_is_told_with_the_rows_without_any(tmp_path):
    rows = rows_of(tmp_path, {"answer": "7"}, {"answer": None}, {"kind": "ocr", "answer": "x"}, {})
    counted = [reward(name="exact"), reward(name="ocr", where={"column": "kind", "equals": ["ocr"]})]
    exact, ocr, without = run_coverage(counted, rows)
    assert "applies to 2 of 4" in exact and "applies to 1 of 4" in ocr and "2 of 4" in without


@pytest.mark.parametrize(
    "text", ["2 + 5 = 7. #### 7", r"So it is $\boxed{7}$.", "<think>2 + 5</think> 7", "<answer>7</answer>"]
)
def test_right_answers_with_their_solutions_are_told_if_whole_texts_are_compared(tmp_path, text):
    rows = rows_of(tmp_path, {"answer": "7"}, {"answer": text}, {"answer": 7})
    for name in ("exact", "normalised", "ocr"):
        (line,) = run_coverage([reward(name=name)], rows)
        assert line.startswith(f"rewards.0 ({name}): 1 of the first 3 right answers")
    assert run_coverage([reward(name="math")], rows) == []


def test_processes_share_many_rows_and_read_none_that_no_reward_depends_on(tmp_path, monkeypatch):
    records = [{"answer": "7" if number % 3 else None, "kind": "ab"[number % 2]} for number in range(3000)]
    rows = rows_of(tmp_path, *records).train.rows
    asked = [reward(name="exact"), reward(name="exact", where={"column": "kind", "equals": ["a"]}), reward(name="ocr")]
    exact = [record["answer"] is not None for record in records]
    even = [has and record["kind"] == "a" for has, record in zip(exact, records, strict=True)]
    assert (
        rows_with_rewards(asked, rows)
        == ([sum(exact), sum(even), sum(exact)], sum(exact))
        == ([2000, 1000, 2000], 2000)
    )
    monkeypatch.setattr(type(rows), "look", None)
    free = [reward(name="length", max_tokens=4), reward(call="a.py:f")]
    assert rows_with_rewards(free, rows) == ([3000, 3000], 3000)
    assert rows_with_rewards(asked, []) == ([0, 0, 0], 0)


def test_a_reward_that_applies_to_no_row_is_an_error_that_names_the_columns(tmp_path):
    rows = rows_of(tmp_path, {"meta": {"ground_truth": "7", "style": "rule"}, "extra_info": {"split": "a"}})
    assert "the rows have the columns meta.ground_truth, " in fault(rows, name="exact")
    assert "answer_column is solution, but no row has" in fault(rows, name="exact", answer_column="solution")
    assert run_coverage([reward(name="exact", answer_column="meta.ground_truth")], rows) == []
    misspelt = rows_of(tmp_path, {"answer": "7", "kind": "count"})
    assert "the rows have the columns answer, " in fault(misspelt, name="exact", answer_column="anwser")


def test_rows_of_turns_alone_are_told_to_add_an_answer(tmp_path):
    rows = rows_of(tmp_path, {"messages": [*TURNS, {"role": "assistant", "content": "7"}]})
    assert "no row has a right answer; " in fault(rows, name="exact") and "named answer" in fault(rows, name="exact")


def test_a_column_of_where_that_no_row_has_and_a_value_that_none_has(tmp_path):
    rows = rows_of(tmp_path, {"answer": "7", "extra_info": {"kind": "count"}})
    assert "where.column is kind" in fault(rows, name="exact", where={"column": "kind", "equals": ["count"]})
    where = {"column": "extra_info.kind", "equals": ["ocr"]}
    assert "extra_info.kind has the values count" in fault(rows, call="a.py:f", where=where)
    where["equals"] = ["count"]
    assert run_coverage([reward(name="exact", where=where)], rows) == []
    assert "no row with extra_info.kind count has a right answer" in fault(
        rows_of(tmp_path, {"extra_info": {"kind": "count"}}), name="exact", where=where
    )


def test_every_reward_without_a_row_is_named_at_once(tmp_path):
    rows = rows_of(tmp_path, {"id": "a"})
    with pytest.raises(DataError) as caught:
        reward_coverage([reward(name="exact"), reward(name="iou"), reward(call="a.py:f")], rows.train.rows, "f")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["rewards.0 (exact)", "rewards.1 (iou)"]


def test_held_out_rows_without_a_reward_are_told_and_no_error(tmp_path):
    rows = rows_of(tmp_path, {"answer": "7"})
    other = rows_of(tmp_path, {"id": "b"})
    (line,) = run_coverage([reward(name="exact")], RunRows(train=rows.train, heldout=other.train))
    assert "applies to none of the 1 rows" in line


def test_a_column_that_was_left_out_is_named_with_its_type(tmp_path):
    train = rows_of(tmp_path, {"id": "a"}).train
    rows = RunRows(
        train=replace(train, rows=tuple(replace(row, left_out=(("made", "date"),)) for row in train.rows)), heldout=None
    )
    assert "values have type date" in fault(rows, name="exact", answer_column="made")
