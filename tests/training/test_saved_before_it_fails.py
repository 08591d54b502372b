"""A run that ends by an error or a stop between updates saves its newest step first; one that ends within an update
does not."""

import json
import os
import signal

import pytest

import tiercel as tc
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.config import recipe_to_yaml
from tiercel.distributed.ranks import Ranks
from tiercel.errors import DataError, ElsewhereError, NonFiniteError, Terminated, TrainingError
from tiercel.log import printed
from tiercel.runs.directory import read_metrics

LATE = """
import pathlib
def variety(sample):
    calls = pathlib.Path(__file__).parent / "calls"
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) > 24:
        raise ValueError("too late")
    return len(set(sample.completion)) / 10
"""
SETTINGS = {"train": {"steps": 4, "save_every": 50, "threads": 1}}


def saved(run):
    folder = run / "checkpoints"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


def test_a_reward_that_raises_late_loses_no_step_and_the_mended_run_goes_on(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(LATE)
    settings = {**SETTINGS, "data": {"eval": None, "workers": 0}}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", **settings)
    said = []
    with pytest.raises(TrainingError, match="too late"), printed(said.append):
        run_grpo(recipe)
    assert saved(tmp_path / "run") == ["step-000002"]
    assert any("step 2 was saved" in line for line in said)
    (tmp_path / "mine.py").write_text("def variety(sample):\n    return len(set(sample.completion)) / 10\n")
    run_grpo(recipe)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert saved(tmp_path / "run") == ["step-000002", "step-000004"]


def test_rows_found_late_lose_no_step(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path, count=36)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[20]["messages"][0]["content"] += " more" * 300  # longer than data.max_prompt_tokens
    rows.write_text("\n".join(map(json.dumps, lines)))
    settings = {**SETTINGS, "data": {"eval": None, "workers": 1, "shuffle": False}}
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", **settings)
    with pytest.raises(DataError, match="1 of 36 rows"):
        run_offline(recipe)
    assert saved(tmp_path / "run") == ["step-000003"]


def test_an_evaluation_that_fails_loses_no_step(tiny_checkpoints, tmp_path, monkeypatch):
    from tiercel.training.offline import loop

    def fail(*arguments):
        if len(read_metrics(tmp_path / "run")) == 2:
            raise DataError("no such row")
        return {"eval/loss": 1.0}

    monkeypatch.setattr(loop, "heldout_loss", fail)
    settings = {"train": {"steps": 4, "save_every": 50, "eval_every": 2}}
    said: list[str] = []
    with pytest.raises(DataError, match="no such row"), printed(said.append):
        run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **settings))
    assert any(f"tiercel eval {tmp_path / 'run'}" in line for line in said)
    assert saved(tmp_path / "run") == ["step-000002"]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize("kind", ("sft", "grpo"))
def test_an_evaluation_that_fails_again_does_not_keep_the_run_from_going_on(
    tiny_checkpoints, tmp_path, monkeypatch, kind
):
    from tiercel.training.grpo import loop as grpo
    from tiercel.training.offline import loop as offline

    module, name = (grpo, "evaluate_policy") if kind == "grpo" else (offline, "heldout_loss")
    honest = getattr(module, name)

    def evaluate(*arguments):
        if len(read_metrics(tmp_path / "run")) in (2, 3):  # after the second step, and when it is made up for
            raise DataError("no such row")
        return honest(*arguments)

    monkeypatch.setattr(module, name, evaluate)
    make, run = (grpo_recipe, run_grpo) if kind == "grpo" else (sft_recipe, run_offline)
    settings = {"train": {"steps": 4, "save_every": 50, "eval_every": 2}}
    recipe = make(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **settings)
    with pytest.raises(DataError, match="no such row"):
        run(recipe)
    run(recipe)
    assert [row.get("eval/count") for row in read_metrics(tmp_path / "run")] == [12, None, None, None, 12]


@pytest.mark.parametrize(("kind", "stop"), (("sft", 0), ("sft", 2), ("sft", 4), ("grpo", 0), ("grpo", 2)))
def test_a_stop_ends_an_evaluation_and_the_resumed_run_makes_it(tiny_checkpoints, tmp_path, monkeypatch, kind, stop):
    from tiercel.training import evaluation
    from tiercel.training.offline import heldout_loss

    module, begun = (evaluation if kind == "grpo" else heldout_loss), list[int]()
    honest = module.next_batch

    def next_batch(loader, ranks):
        begun.append(ranks.heartbeat.activity.step)
        if begun.count(stop) == 1 and begun[-1] == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(loader, ranks)

    monkeypatch.setattr(module, "next_batch", next_batch)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
    make, run = (grpo_recipe, run_grpo) if kind == "grpo" else (sft_recipe, run_offline)
    settings = {"train": {"steps": 4, "save_every": 50, "eval_every": 2, "threads": 1}, "data": {"workers": 0}}
    output = tmp_path / "run"
    recipe = make(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), output, **settings)
    with pytest.raises(Terminated):
        run(recipe)
    assert begun.count(stop) == 1  # of three batches
    assert saved(output) == ([f"step-{stop:06d}"] if stop else [])
    before = read_metrics(output)
    assert [row["step"] for row in before] == (list(range(stop + 1)) if stop else [])
    assert not any("eval/count" in row for row in before[stop:])
    run(recipe)
    after = read_metrics(output)
    assert [row["step"] for row in after] == [0, 1, 2, 3, 4]
    assert [row.get("eval/count") for row in after] == [12, None, 12, None, 12]
    assert all(row.items() <= done.items() for row, done in zip(before, after[: len(before)], strict=True))


@pytest.mark.parametrize("error", (NonFiniteError("the loss is nan", [["row-1"]]), RuntimeError("within the update")))
def test_what_fails_within_an_update_is_not_saved(tiny_checkpoints, tmp_path, monkeypatch, error):
    from tiercel.training.offline import loop

    update, calls = loop.example_update, []

    def fail(*arguments):
        calls.append(None)
        if len(calls) == 2:
            raise error
        return update(*arguments)

    monkeypatch.setattr(loop, "example_update", fail)
    settings = {**SETTINGS, "data": {"eval": None}}
    with pytest.raises(type(error)):
        run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **settings))
    assert saved(tmp_path / "run") == []


def test_a_callback_that_raises_loses_no_step(tiny_checkpoints, tmp_path):
    settings = {**SETTINGS, "data": {"eval": None}}
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **settings)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))

    def note(step):
        if step.number == 2:
            raise KeyError("my mistake")

    with pytest.raises(KeyError, match="my mistake"):
        tc.sft(tmp_path / "recipe.yaml", on_step=note)
    assert saved(tmp_path / "run") == ["step-000002"]


def test_ranks_know_which_errors_all_of_them_raise(monkeypatch):
    ranks = Ranks(rank=0, world_size=2)

    def fail():
        raise DataError("row 3")

    ends = {"own": [(2, "row 3"), None], "other": [None, (2, "row 3")]}
    for name, action, kind in (("own", fail, DataError), ("other", lambda: None, ElsewhereError)):
        monkeypatch.setattr(Ranks, "all_gather", lambda self, value, name=name: ends[name])
        with pytest.raises(kind) as caught:
            ranks.run_on_all(action)
        assert caught.value.is_of_all_ranks
    assert not DataError("alone").is_of_all_ranks
