"""report.html: the page of one run with its parts inside, in one file that opens offline."""

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tiercel.message_text import counted
from tiercel.reliability.diagnosis import symptoms
from tiercel.runs.files import write_atomically
from tiercel.web.report import page_sections
from tiercel.web.report.boxes import has_boxes
from tiercel.web.report.numbers import evenly_spaced
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, RecordedRun, read_groups, read_run
from tiercel.web.report.rollouts import MOST_STEPS
from tiercel.web.report.templates import drawn
from tiercel.web.report.verdict import Notice, headline, note, notices, progress, unfinished, warning
from tiercel.writing import writing

FILE = "report.html"
_BAD_ROWS_SHOWN = 20
_TITLES = {"ranks": "Time"}  # what ranks do is over


def write_report(run: Path) -> Path:
    """Write RUN/report.html from what is in the run directory, and return its path. Raises RunError if it is not a run
    or cannot be read, or the page cannot be written."""
    page = render(read_run(run))
    path = run / FILE
    with writing(path):
        write_atomically(path, page)
    return path


def describe(run: Path) -> str:
    """Summarise the result of a run in one line of text. Raises RunError if `run` is not a run."""
    return headline(read_run(run))


def render(run: RecordedRun) -> str:
    """Make the page's HTML. Equal runs give equal pages."""
    album = Album(run.path / "images")
    evaluations = page_sections.compared_evaluations(run)
    rollouts = [read_groups(run, "rollouts", step) for step in evenly_spaced(run.rollout_steps, MOST_STEPS)]
    made = {  # held-out rows first: what they take of the album stays in the page
        "heldout": page_sections.held_out_part(evaluations, album) if any(file.groups for file in evaluations) else "",
        "rollouts": page_sections.rollouts_part(rollouts, len(run.rollout_steps), album) if rollouts else "",
        "ranks": page_sections.times_part(run),
        "details": page_sections.details_part(run, _BAD_ROWS_SHOWN),
    }
    said = [*unfinished(run), *notices(run), *_page_notices(evaluations, rollouts, album)]
    made["curves"] = page_sections.curves_part(run, said, page_sections.findings_part(symptoms(run.metrics)))
    shown = {tab: made[tab] for tab in page_sections.TABS if made.get(tab, "").strip()}
    return offline(
        "page.html",
        title=f"{run.name}: tiercel {run.kind}",
        origin="the run directory alone",
        name=run.name,
        status=f"{run.kind}, {progress(run)}",
        tabs={tab: _TITLES.get(tab, page_sections.TABS[tab]) for tab in shown},
        parts=shown,
    )


def offline(template: str, **values: Any) -> str:
    """Make a whole page that opens offline and runs only its own script."""
    style, script = asset("page.css"), asset("charts.js") + asset("page.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
    policy += "base-uri 'none'; form-action 'none'"
    return drawn(template, style=Markup(style), script=Markup(script), policy=policy, **values)


@cache
def asset(name: str) -> str:
    """Return the style sheet, the icon or a script of the page."""
    return (Path(__file__).parent.parent / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a content security policy admits a script. No other script on the page may run, whatever
    a completion holds."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _page_notices(evaluations: list[GroupFile], rollouts: list[GroupFile], album: Album) -> Iterator[Notice]:
    """Say what this page could not show, and why."""
    for folder, files in (("evaluations", evaluations), ("rollouts", rollouts)):
        for file in files:
            if file.problem:
                yield warning(file.problem)
            if file.unreadable:
                name = f"{folder}/step-{file.step:06d}.jsonl"
                yield note(f"Left out of {name}: {counted(file.unreadable, 'line')} that cannot be read.")
    groups = [group for file in [*evaluations, *rollouts] for group in file.groups]
    if any(has_boxes(group) and group.coordinate_space is None for group in groups):
        unknown = "The run does not say in which coordinates the model writes boxes"
        yield note(f"{unknown}, so predicted boxes are not drawn.")
    if album.missing:
        count, first = counted(len(album.missing), "image"), next(iter(album.missing.values()))
        yield note(f"Of the rows shown, {count} cannot be read from images/. The first is {first}.")
    if album.left_out:
        yield note(f"To keep this page small, {counted(album.left_out, 'image')} of the rows shown stayed out.")
