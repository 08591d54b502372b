"""Small texts that could cost much: YAML aliases, brackets, arithmetic, variables that double, lines of user code. Each
is refused, or costs nothing, within seconds and a limit of memory, and without a traceback.

    python -m benchmarks.faults --only "bombs"
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tests.rewards.samples import limits, sample
from tiercel.config.yaml_text import LARGEST_TEXT
from tiercel.errors import EXIT_DONE, EXIT_USER
from tiercel.rewards.runtime.user import UserReward

MOST_SECONDS = 60.0
MOST_MEMORY = 4 << 30  # bytes of address space of a process that imports no torch
SHORT = 2


def _levels(count: int, level: str, first: str) -> str:
    """Return a text with ten aliases of each level in the next."""
    lines = [first, *(level.format(n=n, all=",".join([f"*a{n - 1}"] * 10)) for n in range(1, count))]
    return "\n".join(lines) + "\n"


LIST, MERGED = "a{n}: &a{n} [{all}]", "a{n}: &a{n} {{<<: [{all}]}}"
RECIPES = {
    "aliases, 7 levels": _levels(7, LIST, "a0: &a0 [x, y]"),
    "aliases, 40 levels": _levels(40, LIST, "a0: &a0 [x, y]"),
    "merged aliases": _levels(12, MERGED, "a0: &a0 {k: 1}"),
    "open brackets": "a: " + "[" * 100_000,
    "closed brackets": "a: " + "[" * 5000 + "]" * 5000,
    "indentation": "\n".join(" " * depth + "a:" for depth in range(600)),
    "lists in lists": "- " * 50_000,
    "keys in keys": "? " * 50_000,
    "a long number": "seed: " + "9" * 200_000,
    "a long text": "a: " + "x" * (LARGEST_TEXT + 1),
    "many keys": "".join(f"k{number}: 1\n" for number in range(30_000)),
    "many documents": "---\n" * 60_000,
}
OVERRIDES = {
    "open brackets": "a=" + "[" * 50_000,
    "a deep key": "a." * 50_000 + "b=1",
    "a long number": "train.steps=" + "9" * 4400,
    "a deep section": "lora=" + "{a: " * 3000,
}
SCRIPTS = {
    "variables that double": "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40 + "swift sft --model $A",
    "a variable that grows": "A=x\n" + "A+=$A\n" * 60 + "swift sft --model $A",
    "arrays that double": "B=(x x)\n" + 'B=("${B[@]}" "${B[@]}")\n' * 40 + 'swift sft --model "${B[@]}"',
    "a long variable": "A=x\n" + "A=$A$A\n" * 19 + "swift sft --model $A",
    "a tower of powers": "X=$((9**9**9**9))\nswift sft --model a --seed $X",
    "a shifted number": "X=$((1<<100000000000))\nswift sft --model a --seed $X",
    "squares": "X=99999999\n" + "X=$((X*X))\n" * 30 + "swift sft --model a --seed $X",
    "brackets in arithmetic": "X=$((" + "(" * 50_000 + "1" + ")" * 50_000 + "))\nswift sft --model a --seed $X",
    "substitutions": "swift sft --model " + "${A:-" * 20_000 + "x" + "}" * 20_000,
    "open substitutions": "swift sft --model " + "$(" * 20_000,
    "a range": "swift sft --model {1..1000000000}",
    "an endless loop": "while true; do swift sft --model a; done",
    "many flags": "swift sft " + "--model a " * 50_000,
    "many continued lines": "swift sft \\\n" * 50_000,
    "deep Python": "python - <<EOF\n" + "(" * 50_000 + "\nEOF",
}
LINES = {
    "200,000 brackets": b"[" * 200_000,
    "a deep object": b'{"a":' * 50_000,
    "many values": b'{"a":[' + b"[]," * 200_000 + b"[]]}",
    "a long number": b'{"index":' + b"9" * 100_000 + b"}",
    "no text": b"\xff" * 100_000,
}
WRITING = """
import os
import stat

LINE = {line!r}


def score(sample):
    for descriptor in range(3, 300 if sample.completion == "bad" else 3):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.write(descriptor, LINE + b"\\n")
        except OSError:
            pass
    return 1.0
"""


def bombs(size: Size, seed: int, work: Path) -> Figure:
    """Try every text, or the first few of each kind."""
    started = time.perf_counter()
    tried: dict[str, Callable[[], str | None]] = {}
    for number, (name, text) in enumerate(RECIPES.items()):
        file = work / f"recipe-{number}.yaml"
        file.write_text(text, encoding="utf-8")
        tried[f"recipe: {name}"] = partial(_command, ["check", str(file)], EXIT_USER)
    (work / "plain.yaml").write_text("seed: 1\n", encoding="utf-8")
    for name, text in OVERRIDES.items():
        tried[f"override: {name}"] = partial(_command, ["check", str(work / "plain.yaml"), text], EXIT_USER)
    for number, (name, text) in enumerate(SCRIPTS.items()):
        file = work / f"script-{number}.sh"
        file.write_text(text, encoding="utf-8")
        tried[f"script: {name}"] = partial(_command, ["import-command", str(file)], EXIT_USER, EXIT_DONE)
    for number, (name, line) in enumerate(LINES.items()):
        tried[f"user code: {name}"] = partial(_line, line, work / f"reward{number}.py")
    chosen = tried if size == "full" else {name: tried[name] for name in _first_of_each(list(tried))}
    slowest = 0.0
    outcomes: list[Outcome] = []
    for name, attempt in chosen.items():
        began = time.perf_counter()
        outcomes.append((name, attempt()))
        slowest = max(slowest, time.perf_counter() - began)
    return figure_of(
        "bombs", outcomes, seed=seed, seconds=time.perf_counter() - started, figures={"slowest_s": slowest}
    )


def _first_of_each(names: list[str]) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.partition(":")[0], []).append(name)
    return [name for each in kinds.values() for name in each[:SHORT]]


def _command(words: list[str], *codes: int) -> str | None:
    """Run a command, and return what is wrong with its end."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tiercel", *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MOST_SECONDS,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY)),
        )
    except subprocess.TimeoutExpired:
        return f"not done after {MOST_SECONDS:g} s"
    said = done.stdout + done.stderr
    if "Traceback" in said or done.returncode not in codes:
        return f"exit code {done.returncode}: {said[-300:]}"
    return None


def _line(line: bytes, file: Path) -> str | None:
    """Let a reward write a line to its connection. The next batch must be scored."""
    file.write_text(WRITING.format(line=line), encoding="utf-8")
    mine = UserReward(f"{file}:score", limits())
    try:
        mine.start()
        (bad,) = mine.score([sample("bad")])
        (good,) = mine.score([sample()])
    except Exception as error:
        return f"the trainer was given {error!r}"
    finally:
        mine.close()
    if bad.failure is None or good.value != 1.0:
        return f"{bad} and then {good}"
    return None
