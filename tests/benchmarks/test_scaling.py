"""The ranks' benchmark: its arithmetic, and whether its recipes are valid."""

import pytest

from benchmarks.scaling import ARRANGEMENTS, Arrangement, measured_recipe, measured_row
from tiercel.config.conflicts.rules import rule_problems


def steps(*seconds: float) -> list[dict[str, float]]:
    return [{"time/step": each, "time/rollout": each / 2, "time/learn": each / 4} for each in seconds]


def test_efficiency_is_that_of_each_round():
    alone, mine = [steps(10.0, 12.0, 20.0), steps(8.0)], [steps(6.0, 8.0, 7.0), steps(4.0)]
    row = measured_row(Arrangement(strategy="ddp", ranks=2), mine, alone)
    assert row["efficiency"]["min"] == pytest.approx(12 / 14, rel=1e-3) and row["efficiency"]["max"] == 1.0
    assert (row["seconds"]["time/step"]["min"], row["seconds"]["time/step"]["max"]) == (4.0, 8.0)


def test_all_arrangements_take_the_same_step(tmp_path):
    recipes = [measured_recipe(tmp_path, each, tmp_path / each.strategy, steps=3) for each in ARRANGEMENTS]
    assert not [problem for recipe in recipes for problem in rule_problems(recipe)]
    shared = {recipe.model_dump_json(exclude={"output", "train"}) for recipe in recipes}
    assert len(shared) == 1 and {recipe.train.threads for recipe in recipes} == {1}
