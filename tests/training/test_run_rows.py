"""Truncated pictures are found before weights are loaded."""

import json

import pytest

from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tiercel.errors import DataError
from tiercel.log import printed
from tiercel.runs.directory import open_run
from tiercel.training.rows import FIRST_ROWS, read_run_rows, try_first_rows


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-200])


def tried(recipe, step=0):
    """Give what a run hears, and the rows that it records."""
    said = []
    with open_run(recipe) as run, printed(said.append):
        table = read_run_rows(recipe, run).train
        try_first_rows(recipe, table, run, step)
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
    with pytest.raises(DataError, match=r"1 of 12 rows were rejected(.*\n)*.*4-0\.png"):
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
