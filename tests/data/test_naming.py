"""Rows whose columns have other names."""

import json

import pytest

from tiercel.config.data import Data, MixedFile
from tiercel.data.reading import read_rows, read_training_rows
from tiercel.errors import DataError

RENAMED = {"question": "problem", "answer": "label", "images": "image"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read(file, columns, purpose="grpo", **keys):
    return read_rows(file, Data(train=file, columns=columns, **keys), purpose).rows


def test_columns_under_other_names_decide_the_format_and_are_read(tmp_path):
    file = write(tmp_path / "a.jsonl", {"image": ["a.png"], "problem": "Find x.", "label": "5", "level": 3})
    (row,) = read(file, RENAMED, "sft")
    assert [turn.content for turn in row.messages] == ["<image>Find x.", "5"]
    assert row.answer == "5" and row.columns == {"level": 3} and row.images[0].path == "a.png"


def test_a_value_within_a_column_and_two_names_that_change_places(tmp_path):
    record = {"turns": {"asked": "Find x.", "at": 1}, "meta": {"gt": "5"}}
    (row,) = read(write(tmp_path / "a.jsonl", record), {"question": "turns.asked", "answer": "meta.gt"})
    assert row.messages[0].content == "Find x." and row.answer == "5" and row.columns == record
    swapped = write(tmp_path / "b.jsonl", {"question": "5", "answer": "Find x."})
    (row,) = read(swapped, {"question": "answer", "answer": "question"})
    assert (row.messages[0].content, row.answer) == ("Find x.", "5")


def test_a_column_that_no_row_has_is_named_with_the_columns_there(tmp_path):
    file = write(tmp_path / "a.jsonl", {"problem": "Find x.", "label": "5"})
    with pytest.raises(DataError, match=r"data\.columns\.answer is labl, .* problem, label"):
        read(file, {"question": "problem", "answer": "labl"})
    with pytest.raises(DataError, match=r"use \{answer: label\}"):
        read(file, {"label": "answer"})


def test_rows_without_the_column_and_lines_that_are_no_rows_stay_as_they_are(tmp_path):
    file = tmp_path / "a.jsonl"
    write(file, {"problem": "Find x.", "label": "5"}, {"problem": "Find y.", "answer": "6"})
    file.write_text(file.read_text() + "[1]\n")
    table = read_rows(str(file), Data(train=str(file), columns={"answer": "label"}), "grpo")
    assert [row.answer for row in table.rows] == ["5", "6"] and len(table.rejected) == 1


def test_a_row_whose_named_column_is_null_does_not_get_its_own_column_of_that_name(tmp_path):
    rows = ({"question": "a?", "gold": "5", "answer": "said 4"}, {"question": "b?", "gold": None, "answer": "said 6"})
    file = write(tmp_path / "a.jsonl", *rows)
    table = read_rows(file, Data(train=file, columns={"answer": "gold"}), "grpo")
    assert [row.answer for row in table.rows] == ["5", None] and table.notes == ("data.columns: rows without gold: 1",)
    rows = ({"question": "a?", "meta": {"gold": None}, "answer": "said 6"}, {"question": "b?", "meta": {"gold": "7"}})
    file = write(tmp_path / "b.jsonl", *rows)
    assert [row.answer for row in read_rows(file, Data(train=file, columns={"answer": "meta.gold"}), "grpo").rows] == [
        None,
        "7",
    ]


def test_mixed_files_have_names_of_their_own(tmp_path):
    one = write(tmp_path / "a.jsonl", {"q": "Find x.", "answer": "5"})
    two = write(tmp_path / "b.jsonl", {"question": "Find y.", "answer": "6"})
    config = Data(train=one, columns={"question": "q"}, mix=(MixedFile(path=two, columns={}),))
    assert [row.answer for row in read_training_rows(config, "grpo").rows] == ["5", "6"]


def test_rows_without_a_named_column_are_told(tmp_path):
    file = write(tmp_path / "a.jsonl", {"q": "x", "i": "a.png"}, {"q": "y"}, {"q": "z", "i": None})
    table = read_rows(file, Data(train=file, columns={"prompt": "q", "images": "i"}), "grpo")
    assert table.notes == ("data.columns: rows without i: 2",)
    assert [len(row.images) for row in table.rows] == [1, 0, 0]


def test_a_column_of_pictures_may_come_after_the_first_rows(tmp_path):
    texts = [{"q": f"{number}?"} for number in range(70)]
    file = write(tmp_path / "a.jsonl", *texts, {"q": "x", "i": "a.png"})
    columns = {"prompt": "q", "images": "i"}
    assert [len(row.images) for row in read(file, columns)] == [0] * 70 + [1]
    with pytest.raises(DataError, match=r"data\.columns\.images is i, but no row has this column"):
        read(write(tmp_path / "b.jsonl", *texts), columns)


def test_a_column_named_for_two_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", {"q": "x", "i": "a.png"})
    with pytest.raises(DataError, match=r"data\.columns\.question and data\.columns\.answer both name the column q"):
        read(file, {"question": "q", "answer": "q", "images": "i"})


@pytest.mark.parametrize("line", ('{"answer": "1", "answer": "2"}', '{"messages": [{"role": "a", "role": "b"}]}'))
def test_a_key_that_is_there_twice_rejects_its_row(tmp_path, line):
    file = write(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"})
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text() + line + "\n")
    table = read_rows(file, Data(train=file), "grpo")
    (rejected,) = table.rejected
    assert len(table.rows) == 1 and "is set twice; keep one" in rejected.reason


@pytest.mark.parametrize("number", ("1", 0.5, True, [0]))
def test_a_number_of_an_image_that_is_none_rejects_its_row(tmp_path, number):
    row = {"messages": [{"role": "user", "content": "x"}], "images": ["a.png", "b.png"], "answer": [1, 2, 3, 4]}
    file = write(tmp_path / "a.jsonl", row, row | {"answer_image": number})
    (rejected,) = read_rows(file, Data(train=file), "grpo").rejected
    assert rejected.field == "answer_image" and "it must be the number of an image" in rejected.reason
