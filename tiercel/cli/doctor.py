"""`tiercel doctor`: report what this machine can do, what will fail on it, and how to correct that."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from tiercel.doctor.machine import machine_verdicts
from tiercel.doctor.packages import package_verdicts
from tiercel.doctor.trials import collective_verdicts, device_verdicts, import_verdicts
from tiercel.doctor.verdict import Status, Verdict
from tiercel.errors import EnvironmentProblem
from tiercel.message_text import counted
from tiercel.messages import translated
from tiercel.messages.console import SpeakingConsole, padded

STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "broken": "bold red", "absent": "dim"}
MARK_WIDTH, NAME_WIDTH = 9, 20


def run(recipe: None, arguments: Namespace) -> None:
    """Print the verdicts. Raises EnvironmentProblem if something is broken."""
    console = SpeakingConsole(highlight=False, soft_wrap=True)
    verdicts: list[Verdict] = []
    with nullcontext() if arguments.json else console.status(translated("looking")):
        for verdict in examine(Path.cwd()):
            verdicts.append(verdict)
            if not arguments.json:
                console.print(as_text(verdict))
    broken = [verdict.name for verdict in verdicts if verdict.status == "broken"]
    if arguments.json:
        print(json.dumps({"verdicts": [asdict(verdict) for verdict in verdicts], "broken": len(broken)}, indent=1))
    else:
        console.print(summary(verdicts))
    if broken:
        raise EnvironmentProblem(f"broken: {', '.join(broken)}; do what their lines say and run it again")


def examine(directory: Path) -> Iterator[Verdict]:
    """Judge this machine for runs in this directory; yield each verdict as soon as it is known."""
    yield from package_verdicts()
    yield from machine_verdicts(directory)
    gpu_count = yield from device_verdicts()
    if gpu_count is not None:
        yield from collective_verdicts(gpu_count)
    yield from import_verdicts()


def as_text(verdict: Verdict) -> Text:
    """Format a verdict as one line, followed by a line for the remedy if there is one."""
    mark, name = padded(translated(verdict.status), MARK_WIDTH), padded(translated(verdict.name), NAME_WIDTH)
    text = Text.assemble((mark, STYLES[verdict.status]), f"{name} {translated(verdict.found)}")
    if verdict.remedy:
        text.append(f"\n{' ' * MARK_WIDTH}-> {translated(verdict.remedy)}")
    return text


def summary(verdicts: list[Verdict]) -> str:
    """Return one line with the number of verdicts of each kind."""
    counts = {status: sum(verdict.status == status for verdict in verdicts) for status in STYLES}
    return f"{counts['ok']} ok, {counted(counts['warning'], 'warning')}, {counts['broken']} broken"
