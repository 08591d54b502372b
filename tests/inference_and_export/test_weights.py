"""Which checkpoint of a run is exported and used: the newest, that of a step, or the best."""

import json
import stat

import pytest

from tests.training.test_loops import grpo_recipe, run_offline, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.errors import RunError
from tiercel.inference_and_export.weights import CheckpointChoice, trained_weights
from tiercel.runs.checkpoints import save_checkpoint


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, of which the second was the best by its loss and the first by its accuracy."""

    def of(*rows: dict):
        for step in (1, 2, 3):
            save_checkpoint(tmp_path / "checkpoints", step, lambda place: (place / "adapter").mkdir(), {})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path

    return of


def step_of(run, choice: CheckpointChoice, **train) -> str:
    make = grpo_recipe if "keep_best" in train else sft_recipe
    recipe = make("m", run / "rows.jsonl", run, train={"steps": 3, **train})
    return trained_weights(run, recipe, choice).adapter.parent.name


LOSSES = [{"step": step, "eval/loss": loss} for step, loss in ((0, 0.1), (1, 0.5), (2, 0.3), (3, 0.3))]


@pytest.mark.parametrize(
    ("rows", "choice", "expected"),
    [
        (LOSSES, CheckpointChoice(), "step-000003"),
        (LOSSES, CheckpointChoice(step=1), "step-000001"),
        (
            LOSSES,
            CheckpointChoice(is_best=True),
            "step-000002",
        ),  # step 0 has no checkpoint, and the earliest among equal ones is used
        (
            [{"step": 1, "eval/accuracy": 0.4}, {"step": 3, "eval/accuracy": 0.6}],
            CheckpointChoice(is_best=True),
            "step-000003",
        ),
        ([{"step": 2, "eval/reward/mean": -1.0}], CheckpointChoice(is_best=True), "step-000002"),
    ],
)
def test_the_checkpoint_that_is_asked_for(run, rows, choice, expected):
    assert step_of(run(*rows), choice) == expected


def test_the_metric_of_the_recipe_decides_what_is_best(run):
    rows = [{"step": step, "eval/accuracy": 1 - step / 4, "eval/reward/mean": step / 4} for step in (1, 2, 3)]
    assert step_of(run(*rows), CheckpointChoice(is_best=True), keep_best="eval/reward/mean") == "step-000003"
    assert step_of(run(*rows), CheckpointChoice(is_best=True)) == "step-000001"


def test_what_is_not_there_is_refused_with_what_is(run):
    with pytest.raises(RunError, match="no checkpoint of step 7; there are: 1, 2, 3"):
        step_of(run(), CheckpointChoice(step=7))
    with pytest.raises(RunError, match=r"--best: no checkpoint of .* was evaluated"):
        step_of(run({"step": 1, "loss": 1.0}), CheckpointChoice(is_best=True))
    path = run()
    (path / "checkpoints/step-000002/state.json").write_text("{}")
    with pytest.raises(RunError, match="step-000002 is damaged"):
        step_of(path, CheckpointChoice(step=2))


def test_a_merged_checkpoint_answers_as_the_run_does_and_others_may_read_it(tiny_checkpoints, tmp_path, capsys):
    template = tmp_path / "own.jinja"
    own = (tiny_checkpoints["qwen2_5_vl"] / "chat_template.jinja").read_text()
    template.write_text(own.replace("<|im_start|>", "<|im_start|>the "))
    data, train = {"template": str(template)}, {"steps": 2, "save_every": 1}
    rows = write_rows(tmp_path)
    recipe = sft_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / "run", data=data, train=train)
    run = run_offline(recipe)
    merged = tmp_path / "merged"
    assert main(["export", str(run), "--merge", "--checkpoint", "1", "--output", str(merged)]) == 0
    assert main(["export", str(run), "--adapter"]) == 0
    asked = ["Where is the seven?", "--max-new-tokens", "8"]
    capsys.readouterr()
    assert main(["predict", str(run), *asked, "--checkpoint", "1"]) == 0
    assert main(["predict", str(merged), *asked]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert (merged / "chat_template.jinja").read_text() == template.read_text()
    modes = {stat.S_IMODE(file.stat().st_mode) for place in (merged, run / "adapter") for file in place.iterdir()}
    assert modes == {stat.S_IMODE((run / "config.yaml").stat().st_mode)}


@pytest.mark.parametrize("flags", (["--best"], ["--checkpoint", "3"], ["--best", "--adapter", "."]))
def test_a_checkpoint_of_what_is_no_run_is_refused(tiny_checkpoints, flags, capsys):
    assert main(["predict", str(tiny_checkpoints["qwen2_5_vl"]), "Where?", *flags]) == 2
    assert flags[0] in capsys.readouterr().err
