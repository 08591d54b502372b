"""Whole runs whose groups fork: counts, gaps, bytes after a kill, and what is said of parts that cannot go on."""

import pytest

from tests.calling_models import save_calling_checkpoint
from tests.training.test_loops import grpo_recipe, merged, run_grpo, write_rows
from tests.training.test_resume import STEPS, require_same_bytes_after_kills
from tests.training.turn_recipes import CALLS, SCENE, records, turn_recipe
from tiercel.errors import RecipeError
from tiercel.runs.directory import read_metrics

FORK = "    def fork(self):\n        import copy\n        return copy.copy(self)\n\n    def get_reward"


def branch_recipe(checkpoint, rows, output, **changes):
    tree = {
        "data": {"eval": None, "workers": 0},
        "rollout": {"group_size": 4, "branches": [2, 2], "branch_at": "e", "max_new_tokens": 24},
        "rewards": [{"call": f"{rows.parent}/mine.py:variety"}],
    }
    return grpo_recipe(checkpoint, rows, output, **merged(tree, changes))


def starts(line: dict) -> list[list[int]]:
    return [each["token_ids"][: each["forks"][0]] for each in line["completions"]]


def test_parts_are_shared_counted_once_and_learnt(tiny_checkpoints, tmp_path):
    run = run_grpo(branch_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run"))
    for row in read_metrics(run):
        lines = records(run, row["step"])
        drawn = forked = 0
        for line in lines:
            first, second, third, fourth = starts(line)
            assert first == second and third == fourth
            for one, other in (line["completions"][:2], line["completions"][2:]):
                (fork,) = one["forks"]
                assert one["forks"] == other["forks"]
                forked += 2 * (fork < one["tokens"])
                drawn += one["tokens"] + (other["tokens"] - fork)
        assert row["branches/reached_fraction"] == forked / 16 and forked > 0
        assert row["tokens/drawn"] == drawn < row["tokens/completion"]
        assert 0 <= row["branches/between_fraction"] <= 1
        assert row["sampler/logprob_gap_max"] < 1e-4 and row["grad_norm"] > 0
        missing = sum(
            fork == each["tokens"] for line in lines for each in line["completions"] for fork in each["forks"]
        )
        assert (f"step {row['step']}: {missing} of 16 completions did not fork" in (run / "log.txt").read_text()) == (
            missing > 0
        )


def test_a_run_that_is_killed_ends_with_the_same_bytes(tiny_checkpoints, tmp_path):
    changes = {"train": {"steps": STEPS, "save_every": 2, "threads": 1}, "data": {"eval": None, "workers": 1}}
    rows, checkpoint = write_rows(tmp_path), tiny_checkpoints["qwen2_5_vl"]
    require_same_bytes_after_kills(lambda output: branch_recipe(checkpoint, rows, output, **changes), tmp_path)


def test_trajectories_fork_with_their_environment(tiny_checkpoints, tmp_path):
    checkpoint = save_calling_checkpoint(tiny_checkpoints["qwen2_5_vl"], tmp_path / "calling", CALLS)
    changes = {"rollout": {"group_size": 4, "branches": [2, 2]}, "train": {"steps": 2}}
    recipe = turn_recipe(checkpoint, tmp_path / "rows", "run", **changes)
    with pytest.raises(RecipeError) as refused:
        run_grpo(recipe)
    (problem,) = refused.value.problems
    assert problem.startswith("rollout.branches: is [2, 2]") and "scene.py:Scene has no method fork" in problem
    (tmp_path / "rows/scene.py").write_text(SCENE.replace("    def get_reward", FORK))
    run = run_grpo(recipe.model_copy(update={"output": str(tmp_path / "forked")}))
    told = 0
    for row in read_metrics(run):
        assert row["environment/failed"] == 0 and row["sampler/logprob_gap_max"] < 1e-4
        assert row["branches/reached_fraction"] > 0.5
        for line in records(run, row["step"]):
            first, second, third, fourth = starts(line)
            assert first == second and third == fourth
            for each in line["completions"]:
                parts = [turn["calls"][0]["arguments"]["part"] for turn in each["turns"] if _has_answer(turn)]
                told += len(parts) > 1
                assert each["rewards"]["environment"] == pytest.approx(sum(1 / (1 + part) for part in parts))
    assert told > 4


def _has_answer(turn: dict) -> bool:
    return any(call["name"] == "look" and call.get("failure") is None for call in turn["calls"])
