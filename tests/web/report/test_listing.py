"""`tiercel runs`: which runs are found, their state, best score and reason."""

import json
import os
from pathlib import Path

import pytest

from tests.web.report.fake_runs import CONFIG, new_run, write_lines
from tiercel.cli.main import main
from tiercel.errors import RunError
from tiercel.runs.ending import FILE
from tiercel.web.report.listing import listed


def made(path: Path, rows: list[dict], code: int | None, reason: str = "", age: float = 0.0) -> Path:
    new_run(path, CONFIG.replace("STEPS", "40"))
    write_lines(path / "metrics.jsonl", rows)
    if code is not None:
        (path / FILE).write_text(json.dumps({"exit_code": code, "reason": reason}))
    for file in (path, path / "config.yaml", path / "metrics.jsonl"):
        moment = file.stat().st_mtime - age
        os.utime(file, (moment, moment))
    return path


@pytest.fixture
def runs(tmp_path) -> Path:
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 20, "eval/accuracy": 0.75}, {"step": 40, "eval/accuracy": 0.5}]
    made(tmp_path / "runs/rec", rows, 0, age=300)
    made(tmp_path / "runs/deep/er/oom", [{"step": 7, "loss": 1.0}], 3, "out of memory: 3 GB\nlower it", age=200)
    made(tmp_path / "runs/lost", [{"step": 3, "eval/loss": 2.0}, {"step": 4, "eval/loss": 1.5}], None, age=100)
    (tmp_path / "runs/rec/images/inner").mkdir()
    (tmp_path / "runs/rec/images/inner/config.yaml").write_text("")
    return tmp_path / "runs"


def test_runs_are_found_at_any_depth_and_the_newest_is_last(runs):
    entries = listed([runs])
    assert [Path(entry.path).name for entry in entries] == ["rec", "oom", "lost"]
    assert [entry.state for entry in entries] == ["done", "failed", "killed"]
    assert [(entry.step, entry.steps) for entry in entries] == [(40, 40), (7, 40), (4, 40)]


def test_the_best_score_and_the_newest_are_told(runs):
    scores = [entry.score and entry.score.text for entry in listed([runs])]
    assert scores == ["accuracy 0.75 at step 20, now 0.50", None, "loss 1.50 at step 4"]


def test_the_list_says_what_stopped_each(runs, capsys):
    assert main(["runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "verb", "state", "step", "held-out", "training", "lr", "changed"]
    assert "40 of 40" in lines[1] and "done" in lines[1] and "5 min" in lines[1]
    assert "failed" in lines[2] and lines[3] == "    out of memory: 3 GB"
    assert "killed" in lines[4] and "without recording a reason" in lines[5]
    assert lines[6] == "3 runs: 1 done, 1 failed, 1 killed"


def test_reward_or_loss_and_learning_rate_are_told(runs):
    rows = [
        {"step": step, "reward/mean": reward, "loss": 0.1} for step, reward in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.3))
    ]
    path = made(runs / "sampled", rows, 0)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(
        "# tiercel grpo\noptim: {lr: 2.0e-6}\n" + text.partition("\n")[2].replace("optim:", "was:")
    )
    entry = listed([path])[0]
    assert entry.training is not None and entry.training.text == "reward 0.50, best 0.90 at step 2"
    assert entry.learning_rate == 2e-6
    others = {Path(entry.path).name: entry.training and entry.training.text for entry in listed([runs])}
    assert others["oom"] == "loss 1.00, best 1.00 at step 7" and others["rec"] is None


def test_the_list_as_json(runs, capsys):
    assert main(["runs", str(runs), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries[0]["score"] == {"name": "accuracy", "best": 0.75, "step": 20, "newest": 0.5}
    assert entries[1]["reason"] == "out of memory: 3 GB\nlower it"


def test_a_run_of_an_older_version_that_has_its_report_is_done(runs):
    run = made(runs / "old", [{"step": 40, "loss": 1.0}], None)
    (run / "report.html").write_text("")
    assert listed([run])[0].state == "done"


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(runs):
    (runs / "lost/metrics.jsonl").unlink()
    (runs / "lost/metrics.jsonl").mkdir()
    entry = next(entry for entry in listed([runs]) if entry.path.endswith("lost"))
    assert entry.state == "failed" and "cannot be read" in entry.reason


def test_a_link_that_leads_nowhere_hides_no_other_run(runs):
    for name in ("a", "z"):
        (runs / name).symlink_to(name)  # to itself
    (runs / "lost-folder").symlink_to("absent")
    assert [Path(entry.path).name for entry in listed([runs])] == ["rec", "oom", "lost"]


def test_no_run_and_no_folder_are_told(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "no run below" in capsys.readouterr().out
    with pytest.raises(RunError, match="is not a folder"):
        listed([tmp_path / "absent"])
