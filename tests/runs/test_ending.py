"""How a run ended, from what its last process left behind. One process is killed by a real signal."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiercel.errors import StallError, Terminated, TrainingError
from tiercel.runs.ending import FILE, LOCK, ending_of, is_held, recorded_ending

HOLDS = """
import fcntl, os, sys, time
from pathlib import Path
from tiercel.runs.ending import recorded_ending
lock = os.open(Path(sys.argv[1]) / ".lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
with recorded_ending(Path(sys.argv[1])):
    print("begun", flush=True)
    time.sleep(60)
"""


def ended(run: Path, error: BaseException | None = None) -> None:
    if error is None:
        with recorded_ending(run):
            pass
    else:
        with pytest.raises(type(error)), recorded_ending(run):
            raise error


def test_a_run_that_came_to_its_end_is_done(tmp_path):
    ended(tmp_path)
    assert ending_of(tmp_path).state == "done" and ending_of(tmp_path).reason == ""


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (TrainingError("out of memory"), "failed", "out of memory"),
        (Terminated("stopped after step 3, saved"), "stopped", "stopped after step 3, saved"),
        (StallError("rank 1 waits"), "stalled", "rank 1 waits"),
        (ZeroDivisionError("by zero"), "failed", "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), "failed", "KeyboardInterrupt: "),
    ],
)
def test_the_error_that_stopped_a_run_is_its_reason(tmp_path, error, state, reason):
    ended(tmp_path, error)
    assert (ending_of(tmp_path).state, ending_of(tmp_path).reason) == (state, reason)


def test_a_run_that_goes_on_forgets_how_it_ended(tmp_path):
    ended(tmp_path, TrainingError("x"))
    with recorded_ending(tmp_path):
        assert not (tmp_path / FILE).exists()


def test_a_reason_has_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "canary-1234")
    ended(tmp_path, TrainingError("a server refuses canary-1234"))
    assert "canary" not in (tmp_path / FILE).read_text()


def test_a_run_is_running_until_its_process_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    assert ending_of(tmp_path).state == "running"
    process.kill()
    process.wait()
    assert not is_held(tmp_path / LOCK)
    assert ending_of(tmp_path).state == "killed" and "without recording a reason" in ending_of(tmp_path).reason


def test_the_message_of_a_stall_counts_if_it_is_of_the_last_process(tmp_path):
    message = tmp_path / "stall/step-000004/message.txt"
    message.parent.mkdir(parents=True)
    message.write_text("stalled for 600 s\n")
    lock = tmp_path / LOCK
    lock.touch()
    earlier = time.time() - 100
    os.utime(lock, (earlier, earlier))
    assert ending_of(tmp_path).state == "stalled" and ending_of(tmp_path).reason == "stalled for 600 s\n"
    os.utime(lock)
    os.utime(message, (earlier, earlier))
    assert ending_of(tmp_path).state == "killed"


def test_a_file_that_a_full_disk_cut_is_no_ending(tmp_path):
    (tmp_path / FILE).write_text('{"exit_co')
    assert ending_of(tmp_path).state == "killed"
