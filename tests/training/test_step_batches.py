"""Rows step by step, with those of the next step if they are sampled ahead; further rows; rejected ones."""

import json
from contextlib import contextmanager

import pytest

from tests.training.test_loops import sft_recipe, write_rows
from tiercel.errors import DataError
from tiercel.runs.directory import open_run
from tiercel.training.session import open_session
from tiercel.training.step_batches import StepBatches
from tiercel.types import EncodedPrompt


def encode(row, index) -> EncodedPrompt:
    """A prompt without tokens. Rows with two pictures cannot be encoded."""
    if len(row.images) == 2:
        raise DataError("has two pictures", field="images")
    return EncodedPrompt(row=row, index=index, text="", token_ids_P=None, positions_DP=None, images=())


def recipe(tmp_path, **data):
    rows = write_rows(tmp_path)
    keys = {"shuffle": False, "workers": 0, "max_bad_fraction": 1.0, "eval": None, **data}
    return sft_recipe(tmp_path, rows, tmp_path / "run", data=keys, optim={"prompts_per_step": 3})


@contextmanager
def opened_rows(recipe):
    with open_run(recipe) as run, open_session(recipe, run) as session, StepBatches(session, encode) as rows:
        yield rows


def indices(prompts):
    return [prompt.index for prompt in prompts]


@pytest.mark.parametrize(
    ("ahead", "following"), ((0, [[], [], []]), (1, [[[3, 4]], [[6, 7]], []]), (2, [[[3, 4], [6, 7]], [], []]))
)
def test_each_step_has_its_rows_and_those_of_later_ones_where_they_are_wanted(tmp_path, ahead, following):
    with opened_rows(recipe(tmp_path)) as rows:
        steps = [
            (step.number, indices(step.prompts), [indices(prompts) for prompts in step.upcoming])
            for step in rows.steps(ahead=ahead)
        ]
    assert steps == [(number, [3 * number, 3 * number + 1], following[number]) for number in range(3)]
    recorded = [json.loads(line)["id"] for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert recorded == ["row-2", "row-5", "row-8"]


def test_further_rows_come_at_their_indices(tmp_path):
    with opened_rows(recipe(tmp_path)) as rows:
        batch = rows.further(0, [9, 10, 11])
    assert [prompt.row.id for prompt in batch.prompts] == ["row-9", "row-10"]
    assert [row.id for row in batch.rejected] == ["row-11"]


def test_further_rows_may_all_be_rejected(tmp_path):
    with opened_rows(recipe(tmp_path)) as rows:
        batch = rows.further(0, [8, 11])
    assert not batch.prompts and [row.id for row in batch.rejected] == ["row-8", "row-11"]


def test_too_many_rejected_rows_end_the_run(tmp_path):
    strict = recipe(tmp_path, max_bad_fraction=0.1)
    with opened_rows(strict) as rows, pytest.raises(DataError, match="rejected 2 of 12 rows"):
        list(rows.steps())
