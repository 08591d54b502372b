"""Wrong recipes at the command line: each is refused within a second, without torch, with the key and what to write.

The cases are those of tests/config/test_wrong_recipes.py.
"""

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tests.config.recipes import write_files
from tests.config.test_wrong_recipes import WRONG, Wrong, identifier
from tiercel.errors import EXIT_USER

ROOT = Path(__file__).resolve().parents[2]
SHORT_STRIDE = 25
ATTEMPTS = 3  # the best counts, because another process may have had the core
LONGEST_SECONDS = 1.0
COMMAND = """
import sys
from tiercel.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as ending:
    code = ending.code
print("torch" in sys.modules)
raise SystemExit(code)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The command line's answer to a wrong recipe."""

    code: int
    text: str
    has_torch: bool
    seconds: float  # wall time
    processor_seconds: float


def wrong_recipes(size: Size, seed: int, work_dir: Path) -> Figure:
    """Run one process for each. `seed` shifts what a short run leaves out. A short run counts processor seconds,
    because it runs next to other work."""
    started = time.perf_counter()
    write_files(work_dir)
    # The command line itself answers a flag, before there is a recipe.
    cases = [wrong for wrong in WRONG if not any(override.startswith("-") for override in wrong.overrides)]
    cases = cases if size == "full" else cases[seed % SHORT_STRIDE :: SHORT_STRIDE]
    answers = [answer_to(wrong, work_dir) for wrong in cases]
    pairs = list(zip(cases, answers, strict=True))
    outcomes: list[Outcome] = [(identifier(wrong), problem_of(wrong, answer, size)) for wrong, answer in pairs]
    return figure_of(
        "wrong recipes",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "key_named_percent": 100 * sum(wrong.key in answer.text for wrong, answer in pairs) / len(pairs),
            "remedy_named_percent": 100 * sum(wrong.says in answer.text for wrong, answer in pairs) / len(pairs),
            "longest_seconds": max(answer.seconds for answer in answers),
            "longest_processor_seconds": max(answer.processor_seconds for answer in answers),
        },
    )


def problem_of(wrong: Wrong, answer: Answer, size: Size) -> str | None:
    """Return what the answer lacks."""
    if answer.code != EXIT_USER:
        return f"ended with {answer.code}: {answer.text}"
    if answer.has_torch:
        return "torch was imported"
    if wrong.key not in answer.text or wrong.says not in answer.text:
        return f"{wrong.key}, {wrong.says} expected: {answer.text}"
    seconds = answer.seconds if size == "full" else answer.processor_seconds
    return f"took {seconds:.2f} s" if seconds >= LONGEST_SECONDS else None


def answer_to(wrong: Wrong, work_dir: Path) -> Answer:
    """Return the quickest of a few attempts."""
    file = f"{wrong.kind}.yaml"
    if wrong.text is not None:
        file = "wrong.yaml"
        (work_dir / file).write_text(wrong.text, encoding="utf-8")
    command = [sys.executable, "-c", COMMAND, wrong.kind, file, *wrong.overrides]
    best = run(command, work_dir)
    for _ in range(ATTEMPTS - 1):
        if best.seconds >= LONGEST_SECONDS:
            best = min(best, run(command, work_dir), key=lambda answer: answer.seconds)
    return best


def run(command: list[str], work_dir: Path) -> Answer:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started, before = time.perf_counter(), processor_seconds()
    done = subprocess.run(
        command, cwd=work_dir, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    return Answer(
        code=done.returncode,
        text=done.stderr,
        has_torch=done.stdout.strip().endswith("True"),
        seconds=time.perf_counter() - started,
        processor_seconds=processor_seconds() - before,
    )


def processor_seconds() -> float:
    """Return the processor seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
