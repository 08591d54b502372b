"""`tiercel eval`: what it writes."""

import json
import signal
from pathlib import Path

import pytest

from tests.forked import commands
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tests.training.test_resume import write_recipe
from tiercel.cli.evaluate import _judged
from tiercel.cli.main import main
from tiercel.errors import EXIT_DONE, EXIT_USER
from tiercel.models.policy import load_start
from tiercel.runs.evaluation_groups import EvaluationsFile
from tiercel.runs.records import groups_path
from tiercel.training import evaluation

ROOT = Path(__file__).parents[2]


def test_the_completions_after_training_are_those_that_the_run_recorded(tiny_checkpoints, tmp_path):
    run = run_grpo(grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run"))
    output = tmp_path / "scored.jsonl"
    assert main(["eval", str(run), "--output", str(output)]) == EXIT_DONE
    last = groups_path(run, "evaluations", 3)
    written, recorded = ([json.loads(line) for line in file.read_text().splitlines()] for file in (output, last))
    assert [group["id"] for group in written] == [group["id"] for group in recorded]
    for mine, theirs in zip(written, recorded, strict=True):
        assert mine["completions"] == theirs["completions"] and mine["images"] == theirs["images"]


def test_an_evaluation_that_was_ended_goes_on_after_what_is_written(tiny_checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", 4)  # of 12 rows
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run", data={"workers": 0})
    words = ["eval", str(write_recipe(tmp_path / "grpo.yaml", recipe)), "--output"]
    whole, output, part = (tmp_path / name for name in ("whole.jsonl", "scored.jsonl", "scored.jsonl.0.part"))
    assert main([*words, str(whole)]) == EXIT_DONE
    score = capsys.readouterr().out.splitlines()[-1]
    add, batches = EvaluationsFile.add, []

    def ended(self, groups, number, rejected):
        batches.append(number)
        if batches == [1, 2, 3]:
            raise KeyboardInterrupt
        add(self, groups, number, rejected)

    monkeypatch.setattr(EvaluationsFile, "add", ended)
    with pytest.raises(KeyboardInterrupt):
        main([*words, str(output)])
    assert len(part.read_text().splitlines()) == 8 and not output.exists()
    with part.open("a") as file:
        file.write('{"cut short')
    assert main([*words, str(output)]) == EXIT_DONE
    assert output.read_bytes() == whole.read_bytes() and batches == [1, 2, 3, 3]
    assert capsys.readouterr().out.splitlines()[-1] == score
    assert sorted(tmp_path.glob("scored.jsonl.*")) == []


def test_an_evaluation_that_was_killed_goes_on_to_the_same_bytes(tiny_checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "ROWS_AT_ONCE", 4)  # of 12 rows
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run", data={"workers": 0})
    words = ["eval", str(write_recipe(tmp_path / "grpo.yaml", recipe)), "--output"]
    whole, output, part = (tmp_path / name for name in ("whole.jsonl", "scored.jsonl", "scored.jsonl.0.part"))
    with (tmp_path / "log").open("wb") as log:
        ended = commands().start([*words, str(output)], log, module="tests.cli.killed_evaluation")
    assert ended.wait(120) == -signal.SIGKILL and not output.exists(), (tmp_path / "log").read_text()
    assert len(part.read_text().splitlines()) == 8  # a batch more than the state says
    sampled, batches = [], evaluation.Evaluator.batches

    def counted(self, table, start=0):
        sampled.append(start)
        return batches(self, table, start)

    monkeypatch.setattr(evaluation.Evaluator, "batches", counted)
    for each in (output, whole):
        assert main([*words, str(each)]) == EXIT_DONE
    assert output.read_bytes() == whole.read_bytes() and sampled == [1, 0]
    assert sorted(tmp_path.glob("scored.jsonl.*")) == []


def test_another_evaluation_begins_again(tmp_path):
    def begun(key, rows):
        return EvaluationsFile(tmp_path / "scored.jsonl", 0, key).begin(lambda: rows)

    kept = EvaluationsFile(tmp_path / "scored.jsonl", 0, "a")
    assert kept.begin(lambda: ["row"]) == (0, 0)
    kept.add([], batches=3, rejected=2)
    assert begun("a", ["row"]) == (3, 2)
    assert begun("a", ["other"]) == begun("b", ["row"]) == (0, 0)


def test_a_recipe_without_completions_is_told_so(tiny_checkpoints, tmp_path, capsys):
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run")
    given = [str(write_recipe(tmp_path / "sft.yaml", recipe)), str(run_offline(recipe))]
    for target in given:
        assert main(["eval", target, "--output", str(tmp_path / "scored.jsonl")]) == EXIT_USER
        assert "sft has a held-out loss, but no completions to write" in capsys.readouterr().err
    assert not (tmp_path / "scored.jsonl").exists()


def test_a_recipe_is_scored_as_what_its_run_would_start_from(tmp_path):
    recipe = grpo_recipe("model", tmp_path / "rows.jsonl", tmp_path / "run", lora={"init": "runs/sft/adapter"})
    ((label, judged),) = _judged(recipe, tmp_path / "grpo.yaml", None).items()
    assert label == "runs/sft/adapter:" and judged.load is load_start and str(judged.adapter) == label[:-1]
    ((label, judged),) = _judged(recipe, tmp_path / "grpo.yaml", Path("other")).items()
    assert label == "other:" and judged.load is not load_start


def test_the_key_of_a_full_fine_tuning_run_goes_with_its_model(tiny_checkpoints, tmp_path, capsys):
    rows = write_rows(tmp_path)
    run = run_offline(sft_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / "run", lora=None, train={"steps": 1}))
    assert main(["eval", str(run), "data.eval=b.jsonl"]) == EXIT_USER
    said = capsys.readouterr().err
    assert f"model.path={run}/checkpoints/step-000001/model" in said and "--adapter" not in said
