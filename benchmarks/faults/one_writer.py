"""One writer: two processes, one run, and somebody who removes, replaces, copies or moves what distinguishes them.

The second process is refused, or it takes over the directory, and then the first ends at its next row and writes no
more. This holds on one host, between two hosts whose locks do not reach each other, and on a file system without locks.
"""

import errno
import json
import multiprocessing
import os
import platform
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.faults.child import take_own_locks
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tests.runs.test_directory import grpo_recipe
from tiercel.errors import EXIT_TAKEN, EXIT_USER, TiercelError
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.runs import lock
from tiercel.runs.directory import open_run
from tiercel.runs.ending import LOCK

SHORT_STRIDE = 5
RACES = {"short": 1, "full": 10}  # for each pair of places
SECONDS = 30.0  # within which a process answers
BEAT, PATIENCE, SILENCE = 0.2, 0.3, 1.0  # seconds, in place of 2, 5 and 30
NO_LOCKS = ("ENOLCK", "ENOTSUP", "ENOSYS")
PAIRS = (("here", "here"), ("elsewhere", "here"), *((each, each) for each in NO_LOCKS))


class Holder:
    """A fork that opens the run, writes a row whenever it is told to, and reports the result."""

    def __init__(self, run: Path, name: str, where: str):
        context = multiprocessing.get_context("fork")
        self._here, there = context.Pipe()
        self.process = context.Process(target=_hold, args=(there, run, name, where), daemon=True)
        self.process.start()
        there.close()

    def hears(self) -> Any:
        """Return "took", "wrote", the exit code at its end, or None if it was killed."""
        if not self._here.poll(SECONDS):
            return "no answer"
        try:
            return self._here.recv()
        except EOFError:
            return None

    def told(self, word: str) -> Any:
        try:
            self._here.send(word)
        except OSError:
            return None
        return self.hears()

    def signalled(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._here.close()


def _hold(connection: Connection, run: Path, name: str, where: str) -> None:
    take_own_locks()
    lock.BEAT_SECONDS, lock.LOCK_PATIENCE_SECONDS, lock.SILENT_SECONDS = BEAT, PATIENCE, SILENCE
    if where in NO_LOCKS:
        lock.fcntl.flock = _without_locks(where)
    elif where == "elsewhere":  # its locks do not reach this host
        lock.fcntl.flock = lambda *_: None
        platform.node = lambda: "other-host"
        lock._machine = lambda: "another boot"
    try:
        with open_run(grpo_recipe(run)) as opened:
            connection.send("took")
            while connection.recv() == "write":
                opened.record({"step": 1, "by": name})
                connection.send("wrote")
        connection.send(0)
    except TiercelError as error:
        connection.send(error.exit_code)
    except EOFError:
        pass


def _without_locks(name: str) -> Callable[..., None]:
    def flock(*_: object) -> None:
        raise OSError(getattr(errno, name), name)

    return flock


def _lock_removed(run: Path, first: Holder) -> None:
    (run / LOCK).unlink()


def _lock_replaced(run: Path, first: Holder) -> None:
    shutil.copy2(run / LOCK, run / "copy")
    (run / "copy").replace(run / LOCK)


def _lock_written(run: Path, first: Holder) -> None:
    (run / LOCK).write_text("of somebody")


def _pulse_removed(run: Path, first: Holder) -> None:
    shutil.rmtree(run / HEARTBEATS)


def _both_removed(run: Path, first: Holder) -> None:
    _lock_removed(run, first)
    _pulse_removed(run, first)


def _moved(run: Path, first: Holder) -> None:
    run.rename(run.with_name("moved"))


def _replaced_by_a_copy(run: Path, first: Holder) -> None:
    _moved(run, first)
    shutil.copytree(run.with_name("moved"), run, copy_function=shutil.copy2)


def _killed(run: Path, first: Holder) -> None:
    first.signalled(signal.SIGKILL)
    first.process.join()


def _stopped(run: Path, first: Holder) -> None:
    first.signalled(signal.SIGSTOP)


EVENTS: dict[str, Callable[[Path, Holder], None]] = {
    "nothing happens": lambda run, first: None,
    "rm .lock": _lock_removed,
    "a copy in the place of .lock": _lock_replaced,
    "another text in .lock": _lock_written,
    "rm -r pulse": _pulse_removed,
    "rm .lock, rm -r pulse": _both_removed,
    "the directory is moved away": _moved,
    "a copy in the place of the directory": _replaced_by_a_copy,
    "the first is killed": _killed,
    "the first is stopped for a while": _stopped,
}
REFUSED = ("nothing happens", "rm .lock", "a copy in the place of .lock", "another text in .lock")  # always
ENDS = (EXIT_TAKEN, EXIT_USER)  # of the one that has lost the directory; 2: the directory no longer exists


def one_writer(size: Size, seed: int, work: Path) -> Figure:
    """Try each event with each pair of places, then two that start at the same moment. `seed` shifts a short run."""
    started = time.perf_counter()
    cases = [(event, pair) for pair in PAIRS for event in EVENTS]
    outcomes: list[Outcome] = []
    for number, (event, pair) in enumerate(cases if size == "full" else cases[seed % SHORT_STRIDE :: SHORT_STRIDE]):
        outcomes.append((f"{event}, {' and '.join(pair)}", _event_problem(work / str(number) / "run", event, pair)))
    races = [(pair, number) for pair in PAIRS for number in range(RACES[size])]
    outcomes += [
        (f"at the same moment, {' and '.join(pair)}", _race_problem(work / f"race-{pair[0]}-{number}" / "run", pair))
        for pair, number in races
    ]
    return figure_of(
        "one writer of a run",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"starts_at_the_same_moment": len(races), "pairs_of_places": len(PAIRS)},
    )


def _event_problem(run: Path, event: str, pair: tuple[str, str]) -> str | None:
    run.parent.mkdir()
    holders = [Holder(run, "first", pair[0])]
    try:
        said = [holders[0].hears(), holders[0].told("write")]
        if said != ["took", "wrote"]:
            return f"the first {said}"
        EVENTS[event](run, holders[0])
        holders.append(Holder(run, "second", pair[1]))
        second = holders[1].hears()
        if event == "the first is stopped for a while":
            holders[0].signalled(signal.SIGCONT)
        if event == "the first is killed":
            return None if second == "took" and holders[1].told("write") == "wrote" else f"the second {second}"
        if event in REFUSED and second != EXIT_USER:
            return f"the second was not refused: {second}"
        return _two_problem(run, holders, second)
    finally:
        for holder in holders:
            holder.end()


def _race_problem(run: Path, pair: tuple[str, str]) -> str | None:
    run.parent.mkdir()
    holders = [Holder(run, name, where) for name, where in zip(("first", "second"), pair, strict=True)]
    try:
        said = [holder.hears() for holder in holders]
        if said[0] != "took":
            holders.reverse()
            said.reverse()
        if said[0] != "took":
            return f"none has it: {said}"
        time.sleep(2 * BEAT)
        if said[1] == "took" and holders[1].told("write") != "wrote":  # the first was the last to show itself
            return None if holders[0].told("write") == "wrote" else "none has it"
        return _two_problem(run, holders, said[1])
    finally:
        for holder in holders:
            holder.end()


def _two_problem(run: Path, holders: Sequence[Holder], second: Any) -> str | None:
    """Return what is wrong with how two continue after the second has taken over the directory, or was refused."""
    if second == "took":
        wrote = holders[1].told("write"), holders[0].told("write")
        if wrote[0] != "wrote" or wrote[1] not in ENDS:
            return f"the second has it; it {wrote[0]}, the first {wrote[1]}"
    elif second != EXIT_USER or (wrote_on := holders[0].told("write")) != "wrote":
        return f"the second was refused with {second}; the first {wrote_on if second == EXIT_USER else 'was not asked'}"
    writers = [json.loads(line)["by"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    turns = [name for number, name in enumerate(writers) if number == 0 or writers[number - 1] != name]
    return None if len(turns) == len(set(turns)) else f"both wrote, in turn: {writers}"
