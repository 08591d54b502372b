"""The watchdog's own thread: it ends a run without progress, leaves other runs alone, and says which rank is at
fault."""

import errno
import json
import os
import re
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tiercel.errors import EXIT_STALL
from tiercel.reliability import stall_files
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.reliability.stall import RankStatus
from tiercel.reliability.stall_files import RankStatusFiles
from tiercel.reliability.watchdog import ANY_PHASE, Watchdog

LIMIT = 0.6


class Ends:
    """Exit codes that a watchdog would have ended its process with."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


def watchdog(run: Path, heartbeat: Heartbeat, ends: Ends, world_size: int = 1, **limits: float) -> Watchdog:
    files = RankStatusFiles(run / ".signs", world_size)
    return Watchdog(heartbeat, run, files, {ANY_PHASE: LIMIT, **limits}, end=ends)


def test_a_rank_that_stands_still_is_ended_with_its_stack_and_a_message(tmp_path, capsys):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends):
        heartbeat.begin("reward", 4, ["row-7"])
        assert ends.happened.wait(10 * LIMIT)
    assert ends.codes == [EXIT_STALL]
    said = capsys.readouterr().err
    assert "stalled: no progress for" in said and "rank 0" in said and "phase reward of step 4, rows row-7" in said
    assert said.strip() in (tmp_path / "log.txt").read_text()
    assert "test_a_rank_that_stands_still" in (tmp_path / "stall/step-000004/rank-0.txt").read_text()
    assert json.loads((tmp_path / "stall/step-000004/signs.json").read_text())[0]["phase"] == "reward"


def test_progress_keeps_it_alive(tmp_path):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends):
        for _ in range(12):
            time.sleep(LIMIT / 4)
            heartbeat.beat()
    assert not ends.codes
    assert not (tmp_path / "stall").exists()


def test_time_that_the_caller_of_the_steps_takes_is_no_stall(tmp_path):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends):
        heartbeat.begin("record", 4)
        with heartbeat.away():
            assert not ends.happened.wait(3 * LIMIT)
        assert ends.happened.wait(10 * LIMIT)  # afterwards it counts
    assert ends.codes == [EXIT_STALL]


def test_a_phase_may_have_a_longer_limit(tmp_path):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends, save=60.0):
        heartbeat.begin("save", 0)
        time.sleep(2 * LIMIT)
        assert not ends.codes
        heartbeat.begin("learn", 0)
        assert ends.happened.wait(10 * LIMIT)


@pytest.mark.parametrize("culprit", (0, 1))
def test_of_two_ranks_the_one_that_the_other_waits_for_is_named(tmp_path, capsys, monkeypatch, culprit):
    monkeypatch.setattr(
        "tiercel.reliability.watchdog.LOOKS_BETWEEN_STATUSES", 30
    )  # a thread that starts late has not left
    pulses, ends = [Heartbeat(0), Heartbeat(1)], [Ends(), Ends()]
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, pulses[rank], ends[rank], 2))
            pulses[rank].begin("learn", 2, [f"row-of-{rank}"])
        with pulses[1 - culprit].collective("gather (grpo.py:80)"):
            assert all(each.happened.wait(20 * LIMIT) for each in ends)
    assert [each.codes for each in ends] == [[EXIT_STALL]] * 2
    said = capsys.readouterr().err
    assert said.count("stalled:") == 1
    assert f"is in phase learn of step 2, rows row-of-{culprit}; the others wait for it" in said
    assert f"rank {1 - culprit} waits in gather (grpo.py:80)" in said
    assert {file.name for file in (tmp_path / "stall/step-000002").iterdir()} >= {"rank-0.txt", "rank-1.txt"}


def test_a_rank_that_waits_is_left_alone_while_the_other_makes_progress(tmp_path):
    pulses, ends = [Heartbeat(0), Heartbeat(1)], [Ends(), Ends()]
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, pulses[rank], ends[rank], 2))
        with pulses[0].collective("gather (grpo.py:80)"):
            for _ in range(12):
                time.sleep(LIMIT / 4)
                pulses[1].beat()
    assert not ends[0].codes and not ends[1].codes


def test_a_rank_that_says_nothing_any_more_is_named(tmp_path, capsys):
    heartbeat, ends = Heartbeat(0), Ends()
    with watchdog(tmp_path, heartbeat, ends, 2):
        heartbeat.begin("learn", 2)
        with heartbeat.collective("sum of gradients (optimizer_step.py:9)"):
            assert ends.happened.wait(20 * LIMIT)
    said = capsys.readouterr().err
    assert "rank 1 gives no sign of life" in said
    assert "rank 0 waits in sum of gradients (optimizer_step.py:9)" in said


def other_sign(rank: int, looks: int = 0) -> RankStatus:
    """Of a rank that lives elsewhere, in its import."""
    return RankStatus(rank=rank, phase="import", phases=0, step=0, quiet_seconds=0.0, limit_seconds=LIMIT, looks=looks)


def test_a_rank_that_works_names_the_next_one_once_that_is_silent(tmp_path, capsys):
    heartbeat, ends = Heartbeat(0), Ends()
    with watchdog(tmp_path, heartbeat, ends, 2) as dog:
        dog.files.write(other_sign(1))
        started = time.monotonic()
        while not ends.happened.wait(LIMIT / 10):
            heartbeat.beat()
            assert time.monotonic() - started < 20 * LIMIT
    said = capsys.readouterr().err
    assert "rank 1 gives no sign of life" in said and "it was last in phase import of the start" in said
    assert "rank 0 works in phase import of the start" in said
    assert not re.search("no progress for 0 s", said)


def test_a_rank_that_has_not_begun_is_named_and_one_that_left_is_not(tmp_path, capsys):
    heartbeat, ends = Heartbeat(0), Ends()
    with watchdog(tmp_path, heartbeat, ends, 2) as dog:
        dog.files.write(other_sign(1))
        while not dog._has_met_next:
            time.sleep(0.01)
        dog.files.forget(1)
        for _ in range(12):
            heartbeat.beat()
            time.sleep(LIMIT / 4)
        assert not ends.codes
    with watchdog(tmp_path, heartbeat, ends, 2):
        while not ends.happened.wait(LIMIT / 10):
            heartbeat.beat()
    assert "it was last in phase launch of the start, before tiercel's own first line" in capsys.readouterr().err


def test_an_import_may_take_long_while_it_works_and_no_longer(tmp_path, capsys):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends, **{"import": 60.0}):
        until = time.monotonic() + 3 * LIMIT
        while time.monotonic() < until:
            sum(range(10_000))
        assert not ends.codes
        assert ends.happened.wait(20 * LIMIT)
    assert "is in phase import of the start" in capsys.readouterr().err


def test_the_message_has_the_figures_of_the_judgement_whoever_speaks(tmp_path, capsys):
    heartbeat, ends = Heartbeat(0), Ends()
    judged = [replace(other_sign(0, 5), waits_in="gather (a.py:1)"), replace(other_sign(1, 9), quiet_seconds=0.7)]
    with watchdog(tmp_path, heartbeat, ends, 2) as dog:
        dog.files.write(other_sign(1))
        assert dog.files.announce_stall(judged) == judged
        assert dog.files.announce_stall(judged[:1]) == judged  # the first judgement is used
        assert ends.happened.wait(20 * LIMIT)
    assert "no progress for 1 s (the limit is 0.6 s" in capsys.readouterr().err


def test_a_lost_sign_on_a_full_disk_is_still_a_sign_of_life(tmp_path, monkeypatch):
    files = RankStatusFiles(tmp_path, 1)
    files.write(other_sign(0))
    os.utime(tmp_path / "rank-0.json", (1.0, 1.0))
    monkeypatch.setattr(stall_files, "write_new", raising(OSError(errno.ENOSPC, "full")))
    files.write(other_sign(0, 7))
    assert files.written_at(0) > time.time() - 60.0
    assert files.read()[0].looks == 0


def raising(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


def test_nothing_is_left_after_a_run_that_ended(tmp_path):
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, Heartbeat(rank), Ends(), 2))
        time.sleep(LIMIT / 2)
        assert len(list((tmp_path / ".signs").iterdir())) >= 1
    assert not (tmp_path / ".signs").exists()
    assert threading.active_count() == 1 or all(t.name != "watchdog" for t in threading.enumerate())


def test_an_open_run_shows_what_its_rank_does(tmp_path, monkeypatch):
    monkeypatch.setattr("tiercel.reliability.watchdog.SECONDS_BETWEEN_PULSES", 0.0)
    heartbeat, ends = Heartbeat(), Ends()
    file = tmp_path / "pulse" / "rank-0.json"
    with watchdog(tmp_path, heartbeat, ends):
        with heartbeat.shown_in(file):
            heartbeat.begin("learn", 7, ["row-1"])
            until = time.monotonic() + 20 * LIMIT
            while not file.exists() or json.loads(file.read_text())["phase"] != "learn":
                assert time.monotonic() < until
                heartbeat.beat()
                time.sleep(0.02)
            status = json.loads(file.read_text())
            assert (status["rank"], status["step"], status["rows"], status["process"]) == (0, 7, ["row-1"], os.getpid())
            assert status["quiet_seconds"] < status["limit_seconds"]
        assert not file.exists()
        time.sleep(LIMIT / 4)
        heartbeat.beat()
        assert not file.exists()  # the thread continues, and the file does not reappear
    assert not ends.codes
