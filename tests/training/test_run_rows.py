"""Truncated pictures are found before weights are loaded."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tiercel.data.index import FileStore
from tiercel.errors import DataError
from tiercel.log import printed
from tiercel.runs.directory import open_run
from tiercel.training.rows import FIRST_ROWS, read_run_rows, reject_rows_without_media, reject_undecodable_rows


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-200])


def tried(recipe, step=0):
    """Give what a run hears, and the rows that it records."""
    said = []
    with open_run(recipe) as run, printed(said.append):
        table = read_run_rows(recipe, run).train
        reject_undecodable_rows(recipe, table, run, step)
    lines = run.bad_rows_file.read_text().splitlines() if run.bad_rows_file.exists() else []
    return said, [json.loads(line)["id"] for line in lines]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path)


def test_whole_pictures_pass_in_silence(rows, tmp_path):
    assert tried(sft_recipe(tmp_path, rows, tmp_path / "run")) == ([], [])


def test_a_broken_picture_is_counted_and_recorded(rows, tmp_path):
    cut_short(tmp_path / "4-0.png")
    (said,), recorded = tried(sft_recipe(tmp_path, rows, tmp_path / "run", data={"max_bad_fraction": 0.5}))
    assert "1 of the first 12 rows cannot be used" in said and "4-0.png" in said and "check --decode" in said
    assert recorded == ["row-4"]


def test_too_many_broken_pictures_end_the_run_before_the_checkpoint_is_read(rows, tmp_path):
    cut_short(tmp_path / "4-0.png")
    with pytest.raises(DataError, match=r"rejected 1 of 12 rows(.*\n)*.*4-0\.png"):
        run_offline(sft_recipe(tmp_path / "no checkpoint", rows, tmp_path / "run"))


def test_rows_that_all_fail_end_it_whatever_is_allowed(rows, tmp_path):
    lines = [line for number, line in enumerate(rows.read_text().splitlines()) if number % 3]
    rows.write_text("\n".join(lines))
    for picture in tmp_path.glob("*.png"):
        cut_short(picture)
    with pytest.raises(DataError, match="none of the first 8 rows can be used"):
        tried(sft_recipe(tmp_path, rows, tmp_path / "run", data={"max_bad_fraction": 1.0}))


def test_only_the_next_rows_of_the_order_are_tried(tmp_path):
    rows = write_rows(tmp_path, count=FIRST_ROWS + 10)
    cut_short(tmp_path / "37-0.png")
    recipe = sft_recipe(tmp_path, rows, tmp_path / "run", data={"shuffle": False, "max_bad_fraction": 0.5})
    assert tried(recipe) == ([], [])
    assert tried(recipe, step=4)[1] == ["row-37"]


def sought(recipe, step=0):
    """Give what a run hears of missing files, in all its tables, and the rows that it records."""
    said = []
    with open_run(recipe) as run, printed(said.append):
        for table in read_run_rows(recipe, run).tables:
            reject_rows_without_media(recipe, table, run, step)
    lines = run.bad_rows_file.read_text().splitlines() if run.bad_rows_file.exists() else []
    return said, [json.loads(line)["id"] for line in lines]


def test_a_missing_picture_anywhere_ends_a_run_before_the_checkpoint_is_read(tmp_path):
    rows = write_rows(tmp_path, count=FIRST_ROWS + 40)
    (tmp_path / "70-0.png").unlink()
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(rows.read_text().splitlines()[0])
    recipe = sft_recipe(
        tmp_path / "no checkpoint", rows, tmp_path / "run", data={"shuffle": False, "eval": str(heldout)}
    )
    with pytest.raises(DataError, match=r"rejected 1 of 72 rows(.*\n)*.*70-0\.png"):
        run_offline(recipe)


def test_a_missing_picture_of_a_held_out_row_ends_it_too(rows, tmp_path):
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(rows.read_text().replace("5-1.png", "5-9.png"))
    with pytest.raises(DataError, match=r"rejected 1 of 12 rows(.*\n)*.*heldout\.jsonl:6 .*5-9\.png"):
        sought(sft_recipe(tmp_path, rows, tmp_path / "run", data={"eval": str(heldout)}))


def test_few_missing_pictures_are_told_and_recorded(rows, tmp_path):
    (tmp_path / "4-0.png").unlink()
    recipe = sft_recipe(tmp_path, rows, tmp_path / "run", data={"max_bad_fraction": 0.5, "eval": None})
    (said,), recorded = sought(recipe)
    assert "1 of 12" in said and "4-0.png" in said and recorded == ["row-4"]


def test_of_an_index_the_rows_that_come_first_are_looked_at_and_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0)
    monkeypatch.setattr("tiercel.training.rows.MOST_SOUGHT", 8)
    rows = write_rows(tmp_path)
    (tmp_path / "10-0.png").unlink()
    changes = {"shuffle": False, "max_bad_fraction": 0.5, "eval": None, "cache": str(tmp_path / "cache")}
    recipe = sft_recipe(tmp_path, rows, tmp_path / "run", data=changes)
    (said,), recorded = sought(recipe)
    assert "8 rows that come first" in said and "all 12 rows" in said and recorded == []
    assert sought(recipe, step=1)[1] == ["row-10"]


def test_of_pictures_in_the_rows_of_an_index_few_are_read_and_other_files_are_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0)
    monkeypatch.setattr("tiercel.training.rows.MOST_EMBEDDED", 0)
    rows = write_rows(tmp_path, count=5)
    (tmp_path / "4-0.png").unlink()
    picture = {"bytes": (tmp_path / "1-0.png").read_bytes(), "path": None}
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    parts = [{"id": f"in-{each}", "images": [picture], "messages": turns} for each in range(9)]
    parquet.write_table(pyarrow.Table.from_pylist(parts), tmp_path / "rows.parquet")
    data = {"max_bad_fraction": 0.5, "eval": None, "cache": str(tmp_path / "cache")}
    data |= {"mix": [{"path": str(tmp_path / "rows.parquet")}]}
    recipe = sft_recipe(tmp_path, rows, tmp_path / "run", data=data)
    looked, look = [], FileStore.look
    with open_run(recipe) as run:
        table = read_run_rows(recipe, run).train
        monkeypatch.setattr(FileStore, "look", lambda store, number: looked.append(store.file) or look(store, number))
        reject_rows_without_media(recipe, table, run, 0)
    assert [json.loads(line)["id"] for line in run.bad_rows_file.read_text().splitlines()] == ["row-4"]
    assert [looked.count(str(file)) for file in (rows, tmp_path / "rows.parquet")] == [5, 1]
