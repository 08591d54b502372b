"""What `check` finds out about functions of the user's before a run."""

from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.dry_run import _reason
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.errors import EXIT_DONE, EXIT_TRAINING

REWARD = """
def right(sample):
    if int(sample.id.rpartition("-")[2]) in {rows}:
        raise KeyError(sample.id)
    return float(sample.completion.split("<answer>")[{part}].startswith("0"))
"""


@pytest.mark.parametrize(
    ("rows", "part", "code", "failed"),
    [
        ((), 0, EXIT_DONE, None),
        ((7,), 0, EXIT_DONE, "3 of 36"),
        ((0, 7), 0, EXIT_TRAINING, "6 of 36"),
        ((), 1, EXIT_DONE, "24 of 36"),  # a completion without an answer
    ],
)
def test_rows_and_completions_on_which_a_function_fails_are_told(
    tiny_checkpoints, tmp_path: Path, capsys, rows, part, code, failed
):
    path = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD.format(rows=rows, part=part))
    rewards = [{"name": "exact"}, {"call": f"{tmp_path}/mine.py:right"}]
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], path, tmp_path / "run", rewards=rewards)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == code
    said, refused = capsys.readouterr()
    assert (f"reward right: failed on {failed}" in said) == (failed is not None)
    for row in rows:
        assert f"row row-{row}, completion '<answer>0</answer>': KeyError: 'row-{row}'" in said
    assert ("completion 'Unclear.': IndexError" in said) == (part == 1)
    assert ("Traceback" in refused and "KeyError: 'row-0'" in refused) == (code == EXIT_TRAINING)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("reward mine.py:f, row r1: TypeError: no", "TypeError: no"),
        ("reward mine.py:f, row r1: Traceback:\n  File\nKeyError: 'r'", "KeyError: 'r'"),
        ("it took too long", "it took too long"),
        ("reward mine.py:f, row r1: Traceback:\n  File\nValueError: found r1: 3", "ValueError: found r1: 3"),
    ],
)
def test_a_failure_is_told_without_the_row_that_the_line_has(failure, told):
    assert _reason(failure, "r1") == told


def test_a_function_that_returns_one_value_for_a_batch_is_told(tiny_checkpoints, tmp_path: Path, capsys):
    path = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text("def right(completions, **kwargs):\n    return [1.0]\n")
    rewards = [{"call": f"{tmp_path}/mine.py:right"}]
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], path, tmp_path / "run", rewards=rewards)
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml")]) == EXIT_TRAINING
    assert "returned 1 value for 2 samples" in capsys.readouterr().out
