"""A recipe as an object."""

from pathlib import Path

import pytest

import tiercel as tc
from tiercel.api.recipe import reward_entries
from tiercel.errors import RecipeError


def test_a_section_below_a_section_is_changed_and_other_mappings_are_replaced():
    recipe = tc.Recipe({"algorithm": {"kl": {"coef": 0.1, "estimator": "k2"}}, "data": {"columns": {"a": "b"}}})
    found = recipe.changed(algorithm={"kl": {"coef": 0.2}}, data={"train": "x.jsonl", "columns": {"c": "d"}}).tree
    assert found["algorithm"] == {"kl": {"coef": 0.2, "estimator": "k2"}}
    assert found["data"] == {"train": "x.jsonl", "columns": {"c": "d"}}


def test_none_leaves_a_key_as_it_is_and_says_so_for_a_section(caplog):
    recipe = tc.Recipe({"lora": {"rank": 3}, "optim": {"lr": 1e-3, "prompts_per_step": 2}})
    assert recipe.changed(lora=None, lr=None, seed=None) == recipe
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("lora is None")


def test_rewards_are_given_as_to_the_functions():
    assert tc.Recipe().changed(rewards=["exact", ("format", 0.2)]).tree["rewards"] == [
        {"name": "exact"},
        {"name": "format", "weight": 0.2},
    ]
    assert reward_entries(("format", 0.2)) == [{"name": "format", "weight": 0.2}]
    assert reward_entries(("exact", "format")) == [{"name": "exact"}, {"name": "format"}]


def test_a_recipe_with_paths_and_texts_like_numbers_is_written_and_read(tmp_path):
    recipe = tc.Recipe().changed(output=Path("runs/x"), data={"system": "1e3", "train": Path("rows.jsonl")})
    recipe.to_file(tmp_path / "recipe.yaml")
    read = tc.Recipe.from_file(tmp_path / "recipe.yaml").tree
    assert read["data"] == {"system": "1e3", "train": "rows.jsonl"} and read["output"] == "runs/x"


@pytest.mark.parametrize("output", ["~/runs/x", "$HOME/x"])
def test_nothing_is_written_where_a_path_is_refused(tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}]
    with pytest.raises(RecipeError):
        tc.sft(model=str(tmp_path), data=rows, steps=1, output=output)
    assert not list(tmp_path.iterdir())
