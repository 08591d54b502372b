"""Rewards that leave processes behind: every way to hide one, with every way to end; afterwards none is left.

    python -m benchmarks.faults --only "processes that rewards leave"

Each case is a real reward that starts a real process, which would live for ten minutes, and then answers, fails, dies,
attacks the process that watches over it, or loses its trainer to SIGKILL.
"""

import os
import random
import signal
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.rewards import Watched, sample_of, watched
from tiercel.config.schema import Reliability
from tiercel.rewards.runtime.user import UserReward

TIMEOUT = 5.0  # seconds for a batch; fifty processes take a tenth of it to start on a quiet machine
SECONDS_TO_START = 60.0
SECONDS_TO_BE_GONE = 6.0  # after the end
LOOKS = 5  # looks that must find nothing
SHORT = 12  # number of cases

FORK = "if os.fork() == 0:\n    "
SLEEP = "os.execve('/bin/sleep', COMMAND, {})"
DEAF = "[signal.signal(number, signal.SIG_IGN) for number in set(signal.valid_signals()) - {9, 19}]"
HIDINGS = {
    "a child": "subprocess.Popen(COMMAND)",
    "a child in a session of its own": "subprocess.Popen(COMMAND, start_new_session=True)",
    "one without an environment": "subprocess.Popen(COMMAND, start_new_session=True, env={})",
    "one without descriptors, elsewhere": (
        f"{FORK}os.setsid(); os.chdir('/'); os.closerange(0, 4096); {SLEEP}"  # as daemons do
    ),
    "one that was forked twice": f"{FORK}os.setsid(); os.fork() and os._exit(0); {SLEEP}",
    "one that was forked five times": f"{FORK}[os.fork() and os._exit(0) for _ in range(5)]; os.setsid(); {SLEEP}",
    "one that ignores every signal": f"{FORK}os.setsid(); {DEAF}; time.sleep(600); os._exit(0)",
    "one that has stopped": f"{FORK}os.setsid(); os.kill(os.getpid(), signal.SIGSTOP); os._exit(0)",
    "one of a shell in the background": "subprocess.run(['sh', '-c', SHELL, 'sh', *COMMAND])",
    "one by posix_spawn": "os.posix_spawn('/bin/sleep', COMMAND, {}, setsid=True)",
    "fifty at a time": "[subprocess.Popen(COMMAND, start_new_session=True, env={}) for _ in range(50)]",
    "one that forks without end": (
        f"{FORK}os.setsid(); end = time.monotonic() + 600\n"
        "    while time.monotonic() < end:\n"
        "        if os.fork(): os._exit(0)\n"
        "        time.sleep(0.002)"
    ),
    "one that takes its own orphans": (
        f"{FORK}os.setsid(); ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "
        f"os.fork() or os.fork() and os._exit(0) or {SLEEP}; time.sleep(600); os._exit(0)"
    ),
}  # fmt: skip
STOPS = "os.kill(os.getppid(), signal.SIGSTOP)"
ENDINGS = {
    "answers": "pass",
    "raises": "1 / 0",
    "hangs": "time.sleep(600)",
    "ends its process": "os._exit(4)",
    "kills its process": "os.kill(os.getpid(), signal.SIGKILL)",
    "kills its group": "os.killpg(0, signal.SIGKILL)",
    "kills what watches over it": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",
    "stops what watches over it": STOPS,
    "loses its trainer": "time.sleep(600)",
    "stops what watches over it, loses its trainer": f"{STOPS}; open(STARTED, 'w').close(); time.sleep(600)",
}  # fmt: skip
SOURCE = """\
import ctypes
import os
import signal
import subprocess
import time

COMMAND = ["sleep", "600", "0.{mark}"]
SHELL = 'trap "" TERM HUP INT; env -i setsid nohup "$@" >/dev/null 2>&1 &'
STARTED = {started!r}


def score(sample):
    {hiding}
    {ending}
    return 1.0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    hiding: str
    ending: str

    @property
    def loses_trainer(self) -> bool:
        return "loses its trainer" in self.ending


def cases_of(size: Size, seed: int) -> Sequence[Case]:
    """Return all cases, or a few drawn at random."""
    every = [Case(hiding=hiding, ending=ending) for hiding in HIDINGS for ending in ENDINGS]
    return every if size == "full" else random.Random(seed).sample(every, SHORT)


def left_processes(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    most_seconds = 0.0
    for case in cases_of(size, seed):
        problem, seconds = attempt(case, work)
        outcomes.append((f"{case.hiding}; the reward {case.ending}", problem))
        most_seconds = max(most_seconds, seconds)
    return figure_of(
        "processes that rewards leave",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"hidings": len(HIDINGS), "endings": len(ENDINGS), "most_seconds_until_none_is_left": most_seconds},
    )


def attempt(case: Case, work: Path) -> tuple[str | None, float]:
    """Return what is left, and the seconds from the reward's end until nothing was."""
    with TemporaryDirectory(dir=work) as directory, watched(Path(directory)) as traces:
        started = Path(directory) / "started"
        source = SOURCE.format(
            mark=traces.mark,
            started=str(started),
            hiding=textwrap.indent(HIDINGS[case.hiding], "    ").strip(),
            ending=ENDINGS[case.ending] if "STARTED" in ENDINGS[case.ending] else _told(ENDINGS[case.ending]),
        )
        file = Path(directory) / "hostile.py"
        file.write_text(source)
        context = get_context("fork")
        trainer = context.Process(target=_train, args=(f"{file}:score",), daemon=False)
        trainer.start()
        assert trainer.pid is not None
        try:
            if not _until(started.exists, SECONDS_TO_START):
                return "the reward was never called", 0.0
            if case.loses_trainer:
                os.kill(trainer.pid, signal.SIGKILL)
            trainer.join(SECONDS_TO_START)
        finally:
            trainer.kill()
            trainer.join()
        ended = time.perf_counter()
        left = _until_nothing_is_left(traces)
        seconds = time.perf_counter() - ended
        _kill(traces)
        return (left[0] if left else None), seconds


def _told(ending: str) -> str:
    return f"open(STARTED, 'w').close(); {ending}"


def _train(call: str) -> None:
    """Do what a run does with a reward, in a process that may be killed."""
    reward = UserReward(call, Reliability(reward_timeout=TIMEOUT))
    reward.start()
    try:
        reward.score([sample_of("any")])
    finally:
        reward.close()


def _until_nothing_is_left(traces: Watched) -> list[str]:
    """Return what is left after a while. A process that forks and ends at once is easily missed, so look several
    times."""
    deadline, left, empty_looks = time.monotonic() + SECONDS_TO_BE_GONE, [], 0
    while empty_looks < LOOKS and time.monotonic() < deadline:
        left = list(traces.left())
        empty_looks = 0 if left else empty_looks + 1
        time.sleep(0.01)
    return left


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _kill(traces: Watched) -> None:
    """Kill what a failed case has left."""
    for pid in traces.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
