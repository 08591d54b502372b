"""`tiercel eval`: what it writes."""

import json

from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tests.training.test_resume import write_recipe
from tiercel.cli.main import main
from tiercel.errors import EXIT_DONE, EXIT_USER
from tiercel.runs.records import groups_path


def test_the_completions_after_training_are_those_that_the_run_recorded(tiny_checkpoints, tmp_path):
    run = run_grpo(grpo_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run"))
    output = tmp_path / "scored.jsonl"
    assert main(["eval", str(run), "--output", str(output)]) == EXIT_DONE
    last = groups_path(run, "evaluations", 3)
    written, recorded = ([json.loads(line) for line in file.read_text().splitlines()] for file in (output, last))
    assert [group["id"] for group in written] == [group["id"] for group in recorded]
    for mine, theirs in zip(written, recorded, strict=True):
        assert mine["completions"] == theirs["completions"] and mine["images"] == theirs["images"]


def test_a_recipe_without_completions_is_told_so(tiny_checkpoints, tmp_path, capsys):
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run")
    given = [str(write_recipe(tmp_path / "sft.yaml", recipe)), str(run_offline(recipe))]
    for target in given:
        assert main(["eval", target, "--output", str(tmp_path / "scored.jsonl")]) == EXIT_USER
        assert "sft has a held-out loss, but no completions to write" in capsys.readouterr().err
    assert not (tmp_path / "scored.jsonl").exists()
