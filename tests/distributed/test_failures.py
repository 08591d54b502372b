"""What the launcher reports about ranks that failed."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.distributed.exit_diagnosis import RankExit, describe_rank_exits, memory_kills, memory_verdict
from tiercel.distributed.launch import failure_of
from tiercel.distributed.rank_monitor import LAUNCHER_PATIENCE, RankMonitor
from tiercel.distributed.rank_status_files import NOTES, final_code, note_code, stack_file
from tiercel.errors import (
    EXIT_STALL,
    EXIT_TERMINATED,
    EXIT_TRAINING,
    EXIT_USER,
    ElsewhereError,
    TiercelError,
    TrainingError,
)

FAULT = """Fatal Python error: Floating point exception

Thread 0x01 (most recent call first):
  File "threading.py", line 5 in wait

Current thread 0x02 (most recent call first):
  File "linear.py", line 125 in forward

Extension modules: torch._C (total: 1)
"""


def failure(process: int, code: int) -> SimpleNamespace:
    return SimpleNamespace(pid=process, exitcode=code)


def told(notes: Path, failures: dict[int, SimpleNamespace], **moments: float) -> TiercelError:
    """The launcher's error; `moments`: seconds at which processes were seen to have ended, as in p12=3.0."""
    monitor = RankMonitor(notes, 2, 60.0)
    monitor._attempt = {each.pid for each in failures.values()}
    monitor._ends = {int(name[1:]): moment for name, moment in moments.items()}
    return failure_of(monitor, failures, {})


def started(notes: Path, process: int, rank: int) -> Path:
    """Write what a rank writes when it starts. Returns the file for the stack of a signal that ends it."""
    (notes / f"{process}.pid").write_text(str(rank))
    return stack_file(notes, process)


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """A rank's own note of why it ends."""
    monkeypatch.setenv(NOTES, str(tmp_path))

    def note(process: int, code: int) -> None:
        monkeypatch.setattr("tiercel.distributed.rank_status_files.os.getpid", lambda: process)
        note_code(code)

    return note


def test_a_rank_that_was_killed_is_named_though_another_noted_that_it_lost_it(noted, tmp_path):
    noted(11, EXIT_TRAINING)
    error = told(tmp_path, {0: failure(11, EXIT_TRAINING), 1: failure(12, -9)})
    assert isinstance(error, TrainingError) and "rank 1 was killed by SIGKILL" in str(error)
    assert "rank 0" not in str(error)


def test_a_rank_that_ended_without_a_word_is_named(tmp_path):
    error = told(tmp_path, {1: failure(12, 1)})
    assert isinstance(error, TrainingError) and "rank 1 ended with exit code 1" in str(error)


@pytest.mark.parametrize("code", (EXIT_USER, EXIT_TRAINING, EXIT_STALL))
def test_a_rank_that_said_why_is_not_repeated(noted, tmp_path, code):
    noted(11, code)
    error = told(tmp_path, {0: failure(11, code)})
    assert isinstance(error, ElsewhereError) and error.exit_code == code


def test_the_first_note_counts_where_it_is_no_loss_of_another(noted, tmp_path):
    noted(11, EXIT_STALL)
    noted(12, EXIT_TRAINING)
    error = told(tmp_path, {0: failure(11, EXIT_STALL), 1: failure(13, -15)})
    assert isinstance(error, ElsewhereError) and error.exit_code == EXIT_STALL


def test_after_a_signal_to_all_that_is_the_end(tmp_path):
    (tmp_path / "stopped").touch()
    assert told(tmp_path, {0: failure(11, EXIT_TERMINATED)}).exit_code == EXIT_TERMINATED


def test_a_rank_that_the_launcher_ended_is_no_cause(noted, tmp_path):
    noted(11, EXIT_TRAINING)
    failures = {0: failure(11, EXIT_TRAINING), 1: failure(12, -9)}
    late = told(tmp_path, failures, p11=5.0, p12=5.0 + LAUNCHER_PATIENCE)
    assert isinstance(late, ElsewhereError) and late.exit_code == EXIT_TRAINING
    assert isinstance(told(tmp_path, failures, p11=5.0, p12=6.0), TrainingError)
    assert isinstance(told(tmp_path, {0: failures[0], 1: failure(12, -15)}), ElsewhereError)


def test_the_first_that_fell_is_named_and_the_others_as_ended(tmp_path):
    text = str(told(tmp_path, {0: failure(11, -15), 1: failure(12, -11)}))
    assert text.startswith("rank 1 was killed by SIGSEGV: ") and "tiercel then ended rank 0" in text


def test_a_signal_that_would_come_again_is_remembered_over_attempts(tmp_path):
    started(tmp_path, 12, rank=1).write_text(FAULT)
    assert final_code(tmp_path) == EXIT_TRAINING
    text = str(told(tmp_path, {0: failure(11, -15), 1: failure(12, -8)}))
    for part in (
        "rank 1 was killed by SIGFPE",
        "tiercel doctor",
        "model.dtype",
        'File "linear.py", line 125 in forward',
    ):
        assert part in text
    assert (
        "threading.py" not in text and "to resume from the newest" not in text and "no further attempt is made" in text
    )
    stack_file(tmp_path, 12).write_text(FAULT.replace("Floating point exception", "Segmentation fault"))
    assert final_code(tmp_path) is None


def test_a_rank_that_ended_before_the_first_look_at_it_is_named(tmp_path):
    started(tmp_path, 12, rank=1).write_text(FAULT)
    started(tmp_path, 21, rank=0).write_text("")
    unseen = RankMonitor(tmp_path, 2, 60.0)
    text = str(failure_of(unseen, {0: failure(21, -15), 1: failure(22, 1)}, {}))  # process 22 is of a later attempt
    assert text.startswith("rank 1 was killed by SIGFPE: ") and "no further attempt is made" in text


@pytest.mark.parametrize(
    ("number", "words"),
    (
        (signal.SIGILL, ("built for a different", "tiercel doctor", "model.dtype")),
        (signal.SIGSEGV, ("tiercel doctor", "to resume from the newest checkpoint")),
        (signal.SIGBUS, ("/dev/shm", "to resume from the newest checkpoint")),
        (signal.SIGABRT, ("its message is above",)),
    ),
)
def test_each_signal_has_its_cause(number, words):
    text = describe_rank_exits([RankExit(rank=1, code=-number)], {}, {})
    assert all(word in text for word in (number.name, *words))


def test_want_of_memory_is_said_by_the_kernels_own_counts(tmp_path):
    group, machine = tmp_path / "sys/fs/cgroup/job/memory.events", tmp_path / "proc/vmstat"
    for file, text in (
        (tmp_path / "proc/self/cgroup", "0::/job\n"),
        (group, "low 0\noom 1\noom_kill 3\n"),
        (machine, "pgfault 7\noom_kill 5\n"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    before = memory_kills(tmp_path)
    assert before == {group: 3, machine: 5}
    assert "did not change): another process sent the signal" in memory_verdict(before, before)
    assert f"oom_kill in {group} went from 3 to 4" in memory_verdict(before, {**before, group: 4})
    assert f"oom_kill in {machine} went from 5 to 6" in memory_verdict(before, {**before, machine: 6})
    assert memory_verdict({}, {}).startswith("this usually means that memory ran out")


def test_a_machine_with_the_first_version_of_cgroups(tmp_path):
    control = tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control"
    control.parent.mkdir(parents=True)
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:devices:/\n4:memory:/job\n0::/\n")
    assert memory_kills(tmp_path) == {control: 2}
