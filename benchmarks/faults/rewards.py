"""Rewards that misbehave in every way we know: the batch ends in time, and nothing is left of them.

    python -m benchmarks.faults.rewards --size full

Each case is a batch of one reward in which one completion triggers the misbehaviour. The promises: the batch ends
within its timeout and a second; completions answered before keep their value, and those affected are unscorable with a
text that says why; the next batch gets good values; and at the end no process and no file is left.
"""

import argparse
import os
import random
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from uuid import uuid4

from benchmarks.faults.figure import Figure
from tiercel.config.schema import Reliability
from tiercel.reward_types import RewardValue, Sample
from tiercel.rewards.runtime.user import UserReward

MARGIN = 1.0  # seconds by which a batch may exceed its timeout
SEEDS = {"short": 1, "full": 8}
MARK = "TIERCEL_HOSTILE_REWARD"

ABSENT = "no answer within"
EXIT = "its process ended with exit code"
Lost = Literal["none", "itself", "rest", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Misbehaviour:
    """One thing that a reward does, and its effects."""

    source: str  # the body of misbehave()
    lost: Lost  # which completions become unscorable: "rest" means this one and those after it
    says: str = ""  # part of their failure
    is_batched: bool = False
    timeout: float = 1.0  # seconds of a batch


def _raising(source: str, says: str) -> Misbehaviour:
    return Misbehaviour(source=source, lost="itself", says=says)


def _ending(source: str, says: str, timeout: float = 1.0) -> Misbehaviour:
    return Misbehaviour(source=source, lost="rest", says=says, timeout=timeout)


def _forking(source: str) -> Misbehaviour:
    """Return a misbehaviour that starts a child that continues for long, after which the worker ends at once."""
    return _ending(f"if os.fork() == 0:\n    {source}time.sleep(600)\nos._exit(4)", f"{EXIT} 4")


DEAF = "for number in set(signal.valid_signals()) - {9, 19}:\n    signal.signal(number, signal.SIG_IGN)"
MISBEHAVIOURS: dict[str, Misbehaviour] = {
    "loops for ever": _ending("while True: pass", ABSENT),
    "sleeps for ever": _ending("time.sleep(1e6)", ABSENT),
    "searches a regular expression for ever": _ending("re.match('(a+)+b', 'a' * 60)", ABSENT),
    "ignores SIGTERM and loops": _ending("signal.signal(15, signal.SIG_IGN)\nwhile True: pass", ABSENT),
    "ignores every signal it can and sleeps": _ending(f"{DEAF}\ntime.sleep(1e6)", ABSENT),
    "prints without end": _ending("while True: print('x' * 1000)", ABSENT),
    "prints one line without end": _ending("while True: print('x' * 1000, end='')", ABSENT),
    "ends by os._exit": _ending("os._exit(3)", f"{EXIT} 3"),
    "ends by a signal": _ending("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    "kills its process group": _ending("os.killpg(0, signal.SIGKILL)", "SIGKILL"),
    "closes all file descriptors": _ending("os.closerange(0, 4096)", "its process"),
    "writes to its own connection": _ending(
        "for number in range(3, 300):\n"
        "    with contextlib.suppress(OSError): os.write(number, b'nonsense\\n')\n"
        "time.sleep(1e6)",
        "its connection",
    ),
    "allocates 10 GB": _ending("[b'x' * 10**7 for _ in range(1000)]", "reliability.reward_memory_gb = 0.4", timeout=10),
    "allocates 10 GB in children": _ending(
        "for _ in range(10):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        hoard = [b'x' * 10**7 for _ in range(100)]\n"
        "        time.sleep(600)\n"
        "time.sleep(600)",
        "reliability.reward_memory_gb = 0.4",
        timeout=10,
    ),
    "leaves a child": _forking(""),
    "leaves a child in a session of its own": _forking("os.setsid(); "),
    "leaves a daemon that forked twice": _forking("os.setsid(); os.fork() and os._exit(0); "),
    "leaves a child with an empty environment": _ending(
        "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\nos._exit(4)", f"{EXIT} 4"
    ),
    "leaves a child and answers": Misbehaviour(
        source="subprocess.Popen(['sleep', '600'], start_new_session=True)", lost="none"
    ),
    "leaves files and answers": Misbehaviour(
        source="open(os.path.join(tempfile.mkdtemp(), 'left'), 'w').write('behind')", lost="none"
    ),
    "starts threads and answers": Misbehaviour(
        source="for _ in range(50): threading.Thread(target=time.sleep, args=(600,)).start()", lost="none"
    ),
    "writes a huge file": _raising(
        "with tempfile.TemporaryFile() as file:\n    for _ in range(1000): file.write(b'x' * 10**6)",
        "reliability.reward_file_mb = 5",
    ),
    "exhausts file descriptors": _raising(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\nKEPT.extend(open(os.devnull) for _ in range(300))",
        "Too many open files",
    ),
    "raises an exception": _raising("1 / 0", "ZeroDivisionError"),
    "raises SystemExit": _raising("raise SystemExit(5)", "SystemExit: 5"),
    "raises KeyboardInterrupt": _raising("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "answers NaN": _raising("return float('nan')", "returned nan"),
    "answers an infinity": _raising("return float('inf')", "returned inf"),
    "answers text": _raising("return '1.0'", "returned '1.0', a str"),
    "answers one value for all": Misbehaviour(
        source="return [1.0]", lost="all", says="returned 1 value for", is_batched=True
    ),
    "answers one number for all": Misbehaviour(source="return 1.0", lost="all", says="not a float", is_batched=True),
    "raises for a whole batch": Misbehaviour(source="1 / 0", lost="all", says="ZeroDivisionError", is_batched=True),
}

PREAMBLE = """\
import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time

KEPT = []


def misbehave():
"""
CALLED_EACH = """

def score(sample):
    answer = misbehave() if sample.completion == "bad" else None
    return 1.0 if answer is None else answer
"""
CALLED_ONCE = """

def score(samples):
    answer = misbehave() if any(sample.completion == "bad" for sample in samples) else None
    return [1.0] * len(samples) if answer is None else answer


score.batched = True
"""


def hostile_rewards(size: Literal["short", "full"], seed: int, work: Path) -> Figure:
    """Try every misbehaviour, once (short) or with several batch sizes and places of the bad completion (full)."""
    start = time.perf_counter()
    generator = random.Random(seed)
    failures: list[str] = []
    exceeded: list[float] = []
    attempted = 0
    for _ in range(SEEDS[size]):
        for name, misbehaviour in MISBEHAVIOURS.items():
            count = generator.randint(2, 32)
            found, taken = attempt(misbehaviour, count, generator.randrange(count), work)
            failures += [f"{name}, {count} completions: {problem}" for problem in found[:1]]
            exceeded.append(taken - misbehaviour.timeout)
            attempted += 1
    return Figure(
        fault="hostile rewards",
        passed=attempted - len(failures),
        attempted=attempted,
        seed=seed,
        seconds=time.perf_counter() - start,
        figures={"misbehaviours": len(MISBEHAVIOURS), "most_seconds_beyond_a_timeout": max(exceeded)},
        failures=tuple(failures),
    )


def attempt(misbehaviour: Misbehaviour, count: int, place: int, work: Path) -> tuple[list[str], float]:
    """Return what was not as promised, and the seconds that the bad batch took."""
    with TemporaryDirectory(dir=work) as directory, watched(Path(directory)) as traces:
        file = Path(directory) / "hostile.py"
        body = textwrap.indent(misbehaviour.source, "    ")
        file.write_text(PREAMBLE + body + "\n" + (CALLED_ONCE if misbehaviour.is_batched else CALLED_EACH))
        limits = Reliability(reward_timeout=misbehaviour.timeout, reward_memory_gb=0.4, reward_file_mb=5.0)
        reward = UserReward(f"{file}:score", limits)
        try:
            reward.start()
            texts = ["bad" if number == place else "good" for number in range(count)]
            start = time.perf_counter()
            values = reward.score([sample_of(text) for text in texts])
            taken = time.perf_counter() - start
            after = reward.score([sample_of("good")] * 2)
        finally:
            reward.close()
        problems = [*_wrong_values(misbehaviour, place, values), *traces.left()]
    if taken > misbehaviour.timeout + MARGIN:
        problems.append(f"the batch took {taken:.1f} s")
    if [value.value for value in after] != [1.0, 1.0]:
        problems.append(f"the next batch: {after[0].failure or after[1].failure}")
    return problems, taken


def _wrong_values(misbehaviour: Misbehaviour, place: int, values: Sequence[RewardValue]) -> Iterator[str]:
    concerned = {
        "none": range(0),
        "itself": range(place, place + 1),
        "rest": range(place, len(values)),
        "all": range(len(values)),
    }[misbehaviour.lost]
    for number, value in enumerate(values):
        if number not in concerned and value.value != 1.0:
            yield f"completion {number} lost its value: {value.failure}"
        if number in concerned and (value.value is not None or misbehaviour.says not in (value.failure or "")):
            yield f"completion {number} got {value.value}, {value.failure}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """Where a reward's traces would be. Processes that existed before do not belong to it."""

    mark: str
    temporary: Path
    before: frozenset[int]

    def left(self) -> Iterator[str]:
        """Yield the reward's processes, and files below TMPDIR."""
        yield from (f"process {pid} is left: {command}" for pid, command in self.processes().items())
        yield from (f"{path} is left" for path in self.temporary.iterdir())

    def processes(self) -> dict[int, str]:
        """Return, by id, the commands of the processes with the mark in their environment or their command, and of new
        ones without an environment."""
        found = {}
        for pid in sorted(_processes() - self.before):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            is_marked = f"{MARK}={self.mark}".encode() in environment or self.mark in command
            if is_marked or (not environment and command == "sleep 600 "):
                found[pid] = command
        return found


def _processes() -> frozenset[int]:
    return frozenset(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """Give processes that are started inside a mark in their environment, and temporary files their own directory."""
    mark, temporary = str(uuid4().int), directory / "temporary"
    temporary.mkdir()
    before = tempfile.tempdir
    os.environ[MARK], tempfile.tempdir = mark, str(temporary)
    try:
        yield Watched(mark=mark, temporary=temporary, before=_processes())
    finally:
        tempfile.tempdir = before
        del os.environ[MARK]


def sample_of(completion: str) -> Sample:
    return Sample(
        id="row-1",
        prompt="",
        completion=completion,
        token_count=1,
        is_truncated=False,
        answer=None,
        columns={},
        images=(),
        coordinate_space="unit",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("short", "full"), default="short")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with TemporaryDirectory() as work:
        figure = hostile_rewards(options.size, options.seed, Path(work))
    print(
        f"{figure.fault}: {figure.passed} of {figure.attempted} as promised, {figure.seconds:.1f} s, {figure.figures}"
    )
    print(*figure.failures, sep="\n")


if __name__ == "__main__":
    main()
