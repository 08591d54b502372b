"""What a person sees: plain lines if stderr is a file, a live line in a terminal, and everything in log.txt."""

import io
import re
import sys

import pytest

from tiercel.runs import progress as progress_module
from tiercel.runs.progress import Progress, slow_phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Each step takes two seconds."""
    now = iter(range(0, 10_000, 2))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: float(next(now)))


def test_turns_and_failed_calls_are_in_the_line(tmp_path, capsys, clock):
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
        progress.step({"step": 1, "loss": 0.5, "turns/mean": 2.25, "tools/failed_fraction": 0.125})
    assert capsys.readouterr().err == "step 1/1  loss +0.5000  turns 2.2  failed calls 0.12\n"


def test_plain_lines_off_a_terminal(tmp_path, capsys, clock):
    log = tmp_path / "log.txt"
    with Progress(log, total_steps=5, log_every=2) as progress:
        progress.say("runs/x: a new run, 5 steps")
        for step in range(6):
            progress.step({"step": step, "loss": 0.25 * step, "reward/mean": 0.5, "unknown": 1.0})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "runs/x: a new run, 5 steps",
        "step 0/5  loss +0.0000  reward 0.500",
        "step 2/5  loss +0.5000  reward 0.500  left 0:06",
        "step 4/5  loss +1.0000  reward 0.500  left 0:02",
        "step 5/5  loss +1.2500  reward 0.500  left 0:00",
    ]
    assert "\x1b" not in captured.err

    lines = log.read_text().splitlines()
    assert len(lines) == 7  # every step, whatever log_every says
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert lines[2].endswith("step 1/5  loss +0.2500  reward 0.500  left 0:08")


def test_the_trend_of_the_reward_and_a_slow_phase(tmp_path, capsys, clock):
    """Ten steps of reward 0.25, then ten of 0.5; sampling takes three quarters of a step."""
    times = {"time/step": 4.0, "time/rollout": 3.0, "time/learn": 1.0}
    with Progress(tmp_path / "log.txt", total_steps=20, log_every=1) as progress:
        for step in range(1, 21):
            progress.step({"step": step, "reward/mean": 0.25 if step <= 10 else 0.5, **times})
    *_, before, last = capsys.readouterr().err.splitlines()
    assert before == "step 19/20  reward 0.500  step 4.00s (rollout 75%)  left 0:02"
    assert last == "step 20/20  reward 0.500 (+0.250 in 10)  step 4.00s (rollout 75%)  left 0:00"


def test_no_phase_is_slow_where_none_takes_half(tmp_path):
    assert slow_phase({"time/step": 4.0, "time/rollout": 1.9, "time/learn": 1.9}) == ""
    assert slow_phase({"loss": 1.0}) == ""


def test_a_long_line_is_not_wrapped(tmp_path, capsys):
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
        progress.say("x" * 500)
    assert capsys.readouterr().err == "x" * 500 + "\n"


def test_markup_in_a_message_stays_text(tmp_path, capsys):
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
        progress.say("rows [bold]7[/bold] :smile:")
    assert capsys.readouterr().err == "rows [bold]7[/bold] :smile:\n"


def test_a_message_has_no_secrets(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "canary-1234")
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
        progress.say("http://me:word@host refuses canary-1234")
    assert capsys.readouterr().err == "http://redacted@host refuses [redacted MY_SECRET]\n"
    assert (tmp_path / "log.txt").read_text().endswith(" http://redacted@host refuses [redacted MY_SECRET]\n")


def test_hours_left(tmp_path, capsys, clock):
    with Progress(tmp_path / "log.txt", total_steps=3601, log_every=1) as progress:
        progress.step({"step": 0, "loss": 1.0})
        progress.step({"step": 1, "loss": 1.0})
    assert capsys.readouterr().err.splitlines()[-1] == "step 1/3601  loss +1.0000  left 2:00:00"


def test_a_resumed_run_counts_its_own_steps_only(tmp_path, capsys, clock):
    with Progress(tmp_path / "log.txt", total_steps=110, log_every=1) as progress:
        progress.step({"step": 101, "loss": 1.0})
        progress.step({"step": 102, "loss": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "step 101/110  loss +1.0000",
        "step 102/110  loss +1.0000  left 0:16",
    ]


def test_the_log_is_appended_to(tmp_path, capsys):
    for text in ("first", "second"):
        with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
            progress.say(text)
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_a_live_line_on_a_terminal(tmp_path, monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress(tmp_path / "log.txt", total_steps=4, log_every=100) as progress:
        for step in range(1, 5):
            progress.step({"step": step, "loss": -1.0})
        progress.say("done")
    shown = terminal.getvalue()
    assert "━" * 12 + "╌" * 12 + "  step 2/4  loss -1.0000" in shown
    assert "━" * 24 + "  step 4/4" in shown
    assert "done\n" in shown.replace("\r", "")
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 5


def test_a_note_is_in_the_log_and_not_on_the_terminal(tmp_path, capsys):
    with Progress(tmp_path / "log.txt", total_steps=1, log_every=1) as progress:
        progress.note("mine.py:score printed:\n  step 3/999")
    assert capsys.readouterr().err == ""
    first, second = (tmp_path / "log.txt").read_text().splitlines()
    assert first.endswith(" mine.py:score printed:") and second == "  step 3/999"
