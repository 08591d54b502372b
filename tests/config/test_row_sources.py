"""What data.train and the keys like it may name."""

from pathlib import Path

import pytest

from tiercel.config import load_recipe, recipe_to_yaml
from tiercel.config.data import HeldOut
from tiercel.config.row_sources import RowSource, row_source


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ("rows.jsonl", RowSource(path="rows.jsonl")),
        ("rows.jsonl#20", RowSource(path="rows.jsonl", count=20)),
        ("a#b.jsonl#20", RowSource(path="a#b.jsonl", count=20)),
        ("rows.jsonl#some", RowSource(path="rows.jsonl#some")),
        ("hf:org/name", RowSource(path="org/name", split="train")),
        ("hf:org/name:test", RowSource(path="org/name", split="test")),
        ("hf:org/name/en-GB:validation#7", RowSource(path="org/name", config="en-GB", split="validation", count=7)),
        ("hf:org/name:train[10:20]", RowSource(path="org/name", split="train[10:20]")),
        ("hf:/data/one/two/three:test", RowSource(path="/data/one/two/three", split="test")),
        ("hf:empty", RowSource(path="empty", split="train")),
    ],
)
def test_a_source_is_read_from_its_text(workplace: Path, given: str, source: RowSource):
    assert row_source(given) == source


def test_a_file_whose_name_holds_a_number_is_that_file(workplace: Path):
    assert row_source("rows#5.jsonl#3").count == 3
    Path("rows#5").write_text("{}\n", encoding="utf-8")
    assert row_source("rows#5") == RowSource(path="rows#5")
    assert row_source("rows#5#2") == RowSource(path="rows#5", count=2)


def test_rows_are_called_by_their_source_without_the_count():
    assert row_source("rows.jsonl#20").name == "rows.jsonl"
    assert row_source("hf:org/name/en#20").name == "hf:org/name/en:train"


def test_a_recipe_holds_rows_out_and_is_written_as_it_is_read(workplace: Path):
    recipe = load_recipe("grpo", "grpo.yaml", ["data.eval.fraction=0.25", "train.eval_every=5"])
    assert recipe.data.eval == HeldOut(fraction=0.25)
    Path("written.yaml").write_text(recipe_to_yaml(recipe), encoding="utf-8")
    assert load_recipe("grpo", "written.yaml") == recipe
    assert load_recipe("grpo", "grpo.yaml", ["data.eval=rows.jsonl"]).data.eval == "rows.jsonl"
