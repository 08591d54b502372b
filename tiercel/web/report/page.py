"""report.html: one file that opens offline; without JavaScript it lacks the curves alone."""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tiercel import __version__
from tiercel.reliability.diagnosis import symptoms
from tiercel.runs.files import write_atomically
from tiercel.web.report.curves import curves_section
from tiercel.web.report.details import (
    bad_rows_section,
    environment_section,
    log_section,
    recipe_section,
    reproduce_section,
    symptoms_section,
)
from tiercel.web.report.heldout import held_out_section
from tiercel.web.report.markup import Html, element, fragment, trusted
from tiercel.web.report.numbers import NOTHING, duration, evenly_spaced
from tiercel.web.report.pictures import Album, has_boxes
from tiercel.web.report.reading import GroupFile, Run, read_groups, read_run
from tiercel.web.report.rollouts import MOST_STEPS, rollouts_section
from tiercel.web.report.verdict import Notice, changes, completions_sampled, headline, note, notices, progress, warning
from tiercel.wording import counted
from tiercel.writing import writing

FILE = "report.html"


def write_report(run: Path) -> Path:
    """Write RUN/report.html from what is in the run directory, and return its path. Raises RunError where it is no run
    or cannot be read, or the page cannot be written."""
    page = render(read_run(run))
    path = run / FILE
    with writing(path):
        write_atomically(path, page)
    return path


def describe(run: Path) -> str:
    """Summarise the result of a run in one line of text. Raises RunError where `run` is no run."""
    return headline(read_run(run))


def render(run: Run) -> str:
    """Make the page's HTML. Equal runs give equal pages."""
    album = Album(run.path / "images")
    evaluations = [read_groups(run, "evaluations", step) for step in _first_and_last(run.evaluation_steps)]
    steps = [run.rollout_steps[place] for place in evenly_spaced(len(run.rollout_steps), MOST_STEPS)]
    rollouts = [read_groups(run, "rollouts", step) for step in steps]
    shown = [file for file in evaluations if file.groups]
    sections = [
        symptoms_section(symptoms(run.metrics)),
        curves_section(run),
        held_out_section(shown[0], shown[-1], album) if shown else None,
        rollouts_section(rollouts, len(run.rollout_steps), album) if rollouts else None,
        recipe_section(run),
        environment_section(run),
        bad_rows_section(run),
        log_section(run),
        reproduce_section(run),
    ]
    said = [*notices(run), *_page_notices(evaluations, rollouts, album)]
    body = fragment(_header(run, said), sections)
    return document(f"{run.name}: tiercel {run.kind}", "the run directory alone", body)


def _first_and_last(steps: tuple[int, ...]) -> tuple[int, ...]:
    return steps if len(steps) <= 1 else (steps[0], steps[-1])


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
        name, reason = next(iter(album.missing.items()))
        count = counted(len(album.missing), "image")
        yield note(f"Of the rows shown, {count} cannot be read from images/. The first is {name}: {reason}.")
    if album.left_out:
        yield note(f"To keep this page small, {counted(album.left_out, 'image')} of the rows shown stayed out.")


def _header(run: Run, said: list[Notice]) -> Html:
    return element(
        "header",
        element("h1", run.name),
        element("p", headline(run).replace("->", "→"), class_="verdict-line"),
        tiles_block(run),
        notices_block(said),
    )


def notices_block(said: Sequence[Notice]) -> Html:
    """Show the problems of a run, and notes."""
    return fragment([element("p", notice.text, class_=f"notice {notice.level}") for notice in said])


def tiles_block(run: Run) -> Html:
    """Show the numbers of the verdict, and the time."""
    tiles = []
    for change in changes(run):
        number = change.before if change.after is None else f"{change.before} → {change.after}"
        notes = [each for each in (change.before_note, change.after_note, change.note) if each]
        tiles.append(_tile(change.label[:1].upper() + change.label[1:], number, "; ".join(notes)))
    seconds = sum(value for key in ("time/step", "eval/time") for _, value in run.series(key))
    facts = [progress(run)]
    if (sampled := completions_sampled(run)) > 0:
        facts.append(counted(sampled, "completion"))
    tiles.append(_tile("Time", duration(seconds) if seconds else NOTHING, ", ".join(facts)))
    return element("div", tiles, class_="tiles")


def _tile(label: str, number: str, remark: str) -> Html:
    name = element("span", label, class_="label")
    return element("div", name, element("b", number), element("small", remark), class_="tile")


def document(title: str, origin: str, body: Html) -> str:
    """Make a whole page that opens offline and runs only its own script. `origin`: what the page was made from."""
    style, script = _asset("report/report.css"), _asset("static/charts.js") + _asset("report/report.js")
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
    policy += "base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"tiercel {__version__}"),
        element("title", title),
        element("style", trusted(style)),
    )
    footer = element("footer", f"tiercel {__version__}; made from {origin}")
    content = element("body", element("main", body), footer, element("script", trusted(script)))
    page = element("html", head, content, lang="en")
    return f"<!doctype html>\n{page}\n"


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent.parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a content security policy admits a script. No other script on the page may run, whatever
    a completion holds."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
