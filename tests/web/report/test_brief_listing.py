"""The list of runs reads little of each run, and shows the same as if it read everything."""

import json
import math
import random
from pathlib import Path

import pytest

from tests.web.report.fake_runs import grpo_metrics, new_run
from tiercel.web.report import listing
from tiercel.web.report.listing import read_briefly

CONFIG = "# tiercel {}\nmodel:\n  path: x\noptim:\n  lr: 1.0e-05\n  betas:\n  - 0.9\ntrain:\n  steps: {}\noutput: y\n"
KEYS = (*listing.HELD_OUT, *listing.TRAINED)
ROWS = (
    [
        {"step": 0, "eval/accuracy": 0.5},
        *({"step": step, "loss": 2.5 - step, "reward/mean": step / 4} for step in (1, 2)),
    ],
    [{"step": 1, "loss": 1e-3}, {"step": 2, "loss": None}, {"step": 3, "loss": 2, "eval/loss": 4.5}],
    [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": math.inf}],
    [{"step": 1, "eval/reward/mean": -0.5}, {"step": 2}],
    [],
)


def made(path: Path, lines: list[str], kind: str = "grpo", steps: str = "40") -> Path:
    run = new_run(path, CONFIG.format(kind, steps))
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def both(run: Path, monkeypatch) -> tuple[list, list]:
    """The entry as it is, and from everything."""
    short = listing.listed([run])
    with monkeypatch.context() as patch:
        patch.setattr(listing, "read_briefly", lambda path, keys: None)
        return short, listing.listed([run])


@pytest.mark.parametrize("rows", ROWS)
def test_lines_of_training_are_read_briefly(tmp_path, monkeypatch, rows):
    run = made(tmp_path / "run", [json.dumps(row) + "\n" for row in rows])
    assert read_briefly(run, KEYS) is not None
    short, whole = both(run, monkeypatch)
    assert short == whole and short[0].learning_rate == 1e-5 and short[0].steps == 40


def test_a_long_run_is_read_briefly_in_several_parts(tmp_path, monkeypatch):
    rows = grpo_metrics(random.Random(0), 3000, 3000, {0: (3, 9, 0.5), 1500: (8, 9, 0.5), 3000: (7, 9, 0.5)})
    run = made(tmp_path / "run", [json.dumps(row) + "\n" for row in rows], steps="3000")
    assert (run / "metrics.jsonl").stat().st_size > 2 << 20 and read_briefly(run, KEYS) is not None
    short, whole = both(run, monkeypatch)
    assert short == whole and (short[0].step, short[0].score.step) == (3000, 1500)


@pytest.mark.parametrize(
    "odd",
    [
        '{"step": 3, "loss": 9',
        '{"step": 3, "loss": 9}',  # without a newline
        '{"loss": 9, "step": 3}\n',
        '{"step": 3, "note": "\\"loss\\": 9}"}\n',
        '{"step": 3, "more": {"loss": 9}}\n',
        '{"step": 3, "loss": [9, 1]}\n',
        '{"step": 3, "loss": "a, b"}\n',
        "null\n",
        "\n",
        "\x00\x00\x00",
    ],
)
def test_lines_of_another_form_are_read_as_a_whole(tmp_path, monkeypatch, odd):
    run = made(tmp_path / "run", ['{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n', odd])
    assert read_briefly(run, KEYS) is None
    short, whole = both(run, monkeypatch)
    assert short == whole


@pytest.mark.parametrize(
    "odd",
    [
        '{"step": 2, "loss": 9}\n',  # again
        '{"step": 1, "loss": 9}\n',  # in no order
        '{"step": 3.5, "loss": 9}\n',
        '{"step": 3, "loss": "text"}\n',
        '{"step": 90071992547409930, "loss": 9}\n',
    ],
)
def test_odd_rows_are_read_briefly_as_they_are_as_a_whole(tmp_path, monkeypatch, odd):
    run = made(tmp_path / "run", ['{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n', odd])
    assert read_briefly(run, KEYS) is not None
    short, whole = both(run, monkeypatch)
    assert short == whole


@pytest.mark.parametrize(
    "config",
    [
        "train: {steps: 3}\noptim: {lr: 1.0}\n",  # no kind
        "# tiercel sft\ntrain: {steps: 3}\noptim: {lr: 1.0}\n",
        "# tiercel sft\nx: &x {steps: 3}\ntrain: *x\noptim:\n  lr: 1.0\n",
        "# tiercel sft\ntrain:\n  steps: 3\n",
        "# tiercel sft\ntrain:\n\tsteps: 3\noptim:\n  lr: 1\n",
        "# tiercel sft\ntrain:\n  steps: null\noptim:\n  lr: 1\n",  # and nothing in the log
    ],
)
def test_another_config_is_read_as_a_whole(tmp_path, monkeypatch, config):
    run = new_run(tmp_path / "run", config)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert read_briefly(run, KEYS) is None
    short, whole = both(run, monkeypatch)
    assert short == whole


def test_steps_of_a_run_by_epochs_come_from_the_end_of_its_log(tmp_path, monkeypatch):
    run = made(tmp_path / "run", ['{"step": 1, "loss": 3.0}\n'], "sft", "null")
    (run / "log.txt").write_text("x" * 99_999 + "\n2026-01-01 10:00:00 step 1/77  loss 3.0\n  step 3/999\n")
    assert read_briefly(run, KEYS) is not None
    short, whole = both(run, monkeypatch)
    assert short == whole and short[0].steps == 77
