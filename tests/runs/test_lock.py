"""A run directory has one writer, even if its lock was removed, replaced or does not exist. Others are real
processes."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs.test_directory import grpo_recipe
from tiercel.errors import EXIT_TAKEN, RunError, TakenError
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.runs import lock
from tiercel.runs.directory import open_run
from tiercel.runs.ending import FILE, ending_of
from tiercel.runs.lock import WRITER, Hold

# Holds a directory and follows commands on standard input. "elsewhere": as on another host.
OTHER = """
import os, platform, sys
from pathlib import Path
from tiercel.errors import TiercelError
from tiercel.runs import lock
lock.BEAT_SECONDS = 0.2
if sys.argv[2] == "elsewhere":
    platform.node = lambda: "other-host"
    lock._machine = lambda: "another boot"
    lock.fcntl.flock = lambda *_: None
hold = lock.Hold(Path(sys.argv[1]))
try:
    print("took", *([] if hold.take() else ["without locks"]), flush=True)
    for line in sys.stdin:
        if line == "require\\n":
            hold.require()
            print("holds", flush=True)
except TiercelError as error:
    print(error.exit_code, error, flush=True)
finally:
    hold.close()
"""


class Other:
    """Another process that takes a directory."""

    def __init__(self, run: Path, where: str = "here"):
        words = [sys.executable, "-c", OTHER, str(run), where]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.said = self.hears()

    def hears(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def told(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.hears()

    def end(self) -> None:
        self.process.communicate(timeout=30)


@pytest.fixture
def others() -> Iterator[list[Other]]:
    """Processes to be ended after the test."""
    started: list[Other] = []
    yield started
    for other in started:
        other.process.kill()
        with suppress(ValueError, OSError):
            other.process.communicate()


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(lock, "LOCK_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.2)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def refused(run: Path) -> str:
    hold = Hold(run)
    try:
        with pytest.raises(RunError) as raised:
            hold.take()
        return str(raised.value)
    finally:
        hold.close()


def removed(run: Path) -> None:
    (run / ".lock").unlink()


def replaced(run: Path) -> None:
    shutil.copy2(run / ".lock", run / "copy")
    (run / "copy").replace(run / ".lock")


@pytest.mark.parametrize("happens", (removed, replaced))
def test_a_lock_that_was_removed_or_replaced_still_holds_and_is_made_again(run, others, happens):
    others.append(Other(run))
    assert others[0].said == "took"
    happens(run)
    assert f"process {others[0].process.pid} on " in refused(run)
    assert others[0].told("require") == "holds"
    (run / HEARTBEATS / WRITER).unlink()
    assert "another process is writing" in refused(run)
    others[0].end()
    with_hold = Hold(run)
    assert with_hold.take()
    with_hold.close()
    assert not (run / HEARTBEATS).exists()


def test_a_run_whose_directory_another_has_taken_ends_and_leaves_it(run, others, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 60.0)  # a heartbeat would create the file again at once
    with (
        pytest.raises(TakenError, match=r"has taken .*name another directory") as raised,
        open_run(grpo_recipe(run)) as opened,
    ):
        opened.record({"step": 1})
        removed(run)
        shutil.rmtree(run / HEARTBEATS)
        others.append(Other(run))
        assert others[0].said == "took"
        opened.record({"step": 2})
    assert raised.value.exit_code == EXIT_TAKEN == 5 and f"process {others[0].process.pid} on" in str(raised.value)
    assert not (run / FILE).exists() and '"step": 2' not in (run / "metrics.jsonl").read_text()
    assert others[0].told("require") == "holds"


def test_one_that_took_the_directory_and_has_ended_is_noticed(run, others, monkeypatch):
    for has_ending in (True, False):
        monkeypatch.setattr(lock, "BEAT_SECONDS", 60.0 if has_ending else 5.0)
        hold = Hold(run)
        hold.take()
        removed(run)
        shutil.rmtree(run / HEARTBEATS)
        other = Other(run)
        others.append(other)
        assert other.said == "took"
        if has_ending:
            (run / FILE).write_text("{}")
        else:
            (run / FILE).unlink()
            deadline = time.monotonic() + 120
            while hold._other is None and time.monotonic() < deadline:  # until a heartbeat has seen it
                time.sleep(0.05)
        other.end()
        with pytest.raises(TakenError):
            hold.require()
        hold.close()


def test_a_directory_that_was_moved_away_is_not_made_again(run):
    hold = Hold(run)
    hold.take()
    run.rename(run.with_name("moved"))
    time.sleep(3 * lock.BEAT_SECONDS)
    with pytest.raises(RunError, match="cannot be written"):
        hold.require()
    hold.close()
    assert not run.exists()


def test_another_in_the_place_of_one_that_was_moved_away(run, others):
    hold = Hold(run)
    hold.take()
    run.rename(run.with_name("moved"))
    run.mkdir()
    others.append(Other(run))
    with pytest.raises(TakenError):
        hold.require()
    hold.close()


def test_a_killed_one_is_followed_at_once(run, others):
    others.append(Other(run))
    others[0].process.send_signal(signal.SIGKILL)
    others[0].process.wait()
    assert (run / HEARTBEATS / WRITER).exists()
    asked = time.monotonic()
    hold = Hold(run)
    hold.take()
    hold.close()
    assert time.monotonic() - asked < 2.0


def test_a_copy_of_a_run_that_goes_on_is_another_run(run, others):
    others.append(Other(run))
    copy = run.with_name("copy")
    shutil.copytree(run, copy, copy_function=shutil.copy2)
    hold = Hold(copy)
    assert hold.take()
    hold.require()
    hold.close()
    assert others[0].told("require") == "holds"


def test_one_on_another_host_is_seen_by_its_beat(run, others, monkeypatch):
    others.append(Other(run, "elsewhere"))
    assert "on other-host is writing" in refused(run)
    assert others[0].told("require") == "holds"
    others[0].process.send_signal(signal.SIGSTOP)  # like a host that is gone
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.0)
    hold = Hold(run)
    hold.take()
    others[0].process.send_signal(signal.SIGCONT)
    assert others[0].told("require").startswith("5 output: process ")
    hold.require()
    hold.close()


@pytest.mark.parametrize("number", (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS))
def test_a_file_system_without_locks_is_told_and_has_the_second_guard(run, others, monkeypatch, number):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.0)
    with pytest.raises(TakenError), open_run(grpo_recipe(run)) as opened:
        assert "has no locks" in opened.changed[0]
        opened.record({"step": 1})
        assert ending_of(run).state in ("killed", "running")
        others.append(Other(run))
        assert others[0].said.startswith("2 output: process")
        shutil.rmtree(run / HEARTBEATS)  # both started at the same moment
        others.append(Other(run, "elsewhere"))
        assert others[1].said == "took"
        with pytest.raises(TakenError):
            opened.record({"step": 2})
        others[1].end()
        opened.record({"step": 2})


@pytest.mark.parametrize("content", (b"", b"{", b"null", b'{"id": 1}', b"\xff" * 9, b"[" * 9000))
def test_a_file_of_the_writer_that_is_none_holds_nobody_up(run, content):
    (run / HEARTBEATS).mkdir()
    (run / HEARTBEATS / WRITER).write_bytes(content)
    hold = Hold(run)
    hold.take()
    hold.require()
    hold.close()


def test_a_link_in_the_place_of_the_lock_or_the_writer_is_not_followed(run, tmp_path):
    key = tmp_path / "key"
    key.write_text("key")
    for name in (".lock", f"{HEARTBEATS}/{WRITER}"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(key)
        with pytest.raises(RunError, match="cannot be written"), open_run(grpo_recipe(run)):
            pass
        (run / name).unlink()
    assert key.read_text() == "key"


def test_a_folder_that_is_a_link_is_refused(run, tmp_path):
    with open_run(grpo_recipe(run)):
        pass
    (run / "checkpoints").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(RunError, match=r"checkpoints is a link, but a run writes only inside its own directory"),
        open_run(grpo_recipe(run)),
    ):
        pass
