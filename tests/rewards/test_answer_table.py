"""The table of right answers and completions, in the rewards, `check`, training and `eval`."""

import json
import types
from dataclasses import replace

import pytest

from tests.rewards.answer_table import REFUSED, TABLE
from tests.rewards.samples import reward, sample
from tests.training.test_loops import grpo_recipe
from tiercel.cli.dry_run import require_answers, truth_readers
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.schema import Reliability
from tiercel.errors import DataError
from tiercel.rewards.runtime import scorer
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.types import Row

NAMES = ("exact", "number", "count", "choice", "math")


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_gets_its_value(name):
    pairs = [(truth, completion, expected) for each, truth, completion, expected in TABLE if each == name]
    with Scorer([reward(name=name)], Reliability(), "resized_pixels") as scored:
        found = scored.score_samples([sample(said, truth) for truth, said, _ in pairs], [None] * len(pairs))
    got = [REFUSED if each[name].failure else each[name].value for each in found]
    wrong = [(*pair, value) for pair, value in zip(pairs, got, strict=True) if pair[2] != value]
    assert wrong == []


def test_the_table_is_large_and_has_both_writing_systems():
    assert len(TABLE) == len({repr(entry) for entry in TABLE}) >= 200
    assert sum(any("\u3400" <= letter <= "\uffef" for letter in f"{truth}{said}") for _, truth, said, _ in TABLE) >= 40
    assert sum(expected == 1.0 for *_, expected in TABLE) >= 80
    assert sum(expected == 0.0 for *_, expected in TABLE) >= 80


@pytest.mark.parametrize("name", NAMES)
def test_check_refuses_the_right_answers_that_cannot_be_read_and_no_others(name, tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path, rewards=[{"name": name}])
    family = types.SimpleNamespace(coordinate_space="resized_pixels")
    with truth_readers(recipe) as readers:
        for index, (_, truth, _, expected) in enumerate(each for each in TABLE if each[0] == name):
            row = Row(id=f"{index}", messages=(), images=(), answer=truth, columns={}, file="rows.jsonl", line=index)
            try:
                require_answers(recipe, family, row, [], readers)
                is_refused = False
            except DataError as error:
                is_refused = True
                assert error.field == "answer" and str(error).startswith(f"row {index}, column answer: ")
            assert is_refused == (expected == REFUSED), truth


def test_training_and_eval_give_the_values_of_the_table(tiny_checkpoints, tmp_path, monkeypatch):
    """Ask both commands, with the table's completions in place of what the tiny model says."""
    chosen = [entry for entry in TABLE if entry[3] != REFUSED and entry[1] is not None][::12]
    rows = [
        {"id": f"{index}", "answer": truth, "task": name, "messages": [{"role": "user", "content": "What?"}]}
        for index, (name, truth, _, _) in enumerate(chosen)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rewards = [{"name": name, "where": {"column": "task", "equals": [name]}} for name in NAMES]
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        tmp_path / "rows.jsonl",
        tmp_path / "run",
        rewards=rewards,
        rollout={"group_size": 2, "max_new_tokens": 1},
        data={"workers": 0},
        optim={"prompts_per_step": len(rows)},
        train={"steps": 1, "save_every": 1},
    )
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    make_sample = scorer.make_sample

    def say(prompt, completion, *others):
        return replace(make_sample(prompt, completion, *others), completion=chosen[int(prompt.row.id)][2])

    monkeypatch.setattr(scorer, "make_sample", say)
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 0
    assert main(["grpo", str(tmp_path / "recipe.yaml")]) == 0
    assert main(["eval", str(tmp_path / "run"), "--output", str(tmp_path / "answers.jsonl")]) == 0
    (rollouts,) = (tmp_path / "run" / "rollouts").glob("step-*.jsonl")
    expected = {str(index): {name: value} for index, (name, _, _, value) in enumerate(chosen)}
    for file in (rollouts, tmp_path / "answers.jsonl"):
        lines = [line for line in map(json.loads, file.read_text().splitlines()) if "completions" in line]
        got = {line["id"]: _values(line["completions"][0]["rewards"]) for line in lines}
        assert got == expected


def _values(rewards: dict) -> dict:
    return {name: value for name, value in rewards.items() if value is not None}
