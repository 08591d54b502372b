"""The launcher's own watchdog, over a real process that never starts working."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tiercel.distributed import rank_monitor
from tiercel.distributed.rank_monitor import RankMonitor, is_running, started_ranks
from tiercel.distributed.rank_status_files import NOTES, noted_code
from tiercel.errors import EXIT_STALL

PATIENCE = rank_monitor.SECONDS_TO_SPEAK + 20.0


@pytest.fixture
def sleeper():
    """A child that has a rank and says nothing. Its variables can be read a moment after it has started."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"RANK": "0"})
    deadline = time.monotonic() + PATIENCE
    while not started_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def test_a_rank_that_never_begins_is_named_with_its_process_and_ended(sleeper, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(NOTES, str(tmp_path))
    with RankMonitor(tmp_path, 1, 0.3) as monitor:
        assert sleeper.wait(PATIENCE) == -signal.SIGKILL
    said = capsys.readouterr().err
    assert f"process {sleeper.pid}) gives no sign of life: its process exists, but is waiting for something" in said
    assert "phase launch of the start, before tiercel's own first line" in said and "(the limit is 0.3 s" in said
    assert noted_code(tmp_path) == EXIT_STALL
    (rank_exit,) = monitor.exits({0: (sleeper.pid, -signal.SIGKILL)})
    assert rank_exit.was_ended


def test_a_rank_that_left_the_watch_is_left_alone(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_monitor, "SECONDS_TO_SPEAK", 0.2)
    with RankMonitor(tmp_path, 1, 0.3) as monitor:
        deadline = time.monotonic() + PATIENCE
        while monitor.files.written_at(0) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        monitor.files.leave(0)
        time.sleep(rank_monitor.SECONDS_TO_SPEAK + 1.0)
        assert monitor._thread.is_alive()
    assert is_running(sleeper.pid)


def test_ranks_are_children_that_have_one(sleeper):
    assert started_ranks() == {sleeper.pid: 0}
    assert is_running(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(sleeper.pid)  # a zombie
