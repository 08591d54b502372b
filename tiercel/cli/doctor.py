"""`tiercel doctor`: what this machine can do, what will fail on it, and how to correct that."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tiercel.doctor.examination import examine
from tiercel.doctor.verdict import Status, Verdict
from tiercel.errors import EnvironmentProblem

STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "broken": "bold red", "absent": "dim"}
MARK_WIDTH, NAME_WIDTH = 9, 20


def run(recipe: None, arguments: Namespace) -> None:
    """Print the verdicts. Raises EnvironmentProblem where something is broken."""
    console = Console(highlight=False, soft_wrap=True)
    verdicts: list[Verdict] = []
    if arguments.json:
        verdicts.extend(examine(Path.cwd()))
    else:
        with console.status("looking"):
            for verdict in examine(Path.cwd()):
                verdicts.append(verdict)
                console.print(as_text(verdict))
    broken = [verdict.name for verdict in verdicts if verdict.status == "broken"]
    if arguments.json:
        print(json.dumps({"verdicts": [asdict(verdict) for verdict in verdicts], "broken": len(broken)}, indent=1))
    else:
        console.print(summary(verdicts))
    if broken:
        raise EnvironmentProblem(f"broken: {', '.join(broken)}; do what their lines say and run it again")


def as_text(verdict: Verdict) -> Text:
    """Format a verdict as one line, with a second line for the remedy where there is one."""
    text = Text.assemble(
        (verdict.status.ljust(MARK_WIDTH), STYLES[verdict.status]), f"{verdict.name.ljust(NAME_WIDTH)} {verdict.found}"
    )
    if verdict.remedy:
        text.append(f"\n{' ' * MARK_WIDTH}-> {verdict.remedy}")
    return text


def summary(verdicts: list[Verdict]) -> str:
    """Return one line with the number of verdicts of each kind."""
    counts = {status: sum(verdict.status == status for verdict in verdicts) for status in STYLES}
    warnings = "1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings"
    return f"{counts['ok']} ok, {warnings}, {counts['broken']} broken"
