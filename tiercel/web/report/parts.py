"""The parts of the page that show one run, as report.html and the page of `tiercel view` both have them."""

from collections.abc import Sequence
from itertools import chain

from markupsafe import Markup

from tiercel.reliability.diagnosis import Symptom
from tiercel.web.report.curves import charts_of, curves_note, time_chart
from tiercel.web.report.details import facts, versions
from tiercel.web.report.heldout import held_out_of
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, RecordedRun
from tiercel.web.report.rollouts import legend_of, shown_step
from tiercel.web.report.templates import drawn
from tiercel.web.report.times import times_of
from tiercel.web.report.verdict import Notice, headline, tiles, warning

TABS = {
    "curves": "Curves",
    "rollouts": "Rollouts",
    "heldout": "Held out",
    "ranks": "Ranks and time",
    "details": "Data and recipe",
    "compare": "Compare",
}
LIVE_KEYS = (("Enter", "all steps of the card's row"),)  # of the page that follows runs
KEYS = (
    ("j, k", "next and previous card"),
    ("n, p", "first card of the next step, and of the one before"),
    *LIVE_KEYS,
    ("c", "next way to colour tokens"),
    ("/", "search in the texts"),
    ("1 to 6", "the parts of the page"),
    ("g", "back to the top, to the newest"),
    ("Esc", "leave a field; clear the filters"),
    ("?", "this help"),
)
_LINES_AT_START = 12  # of the log, before the first step
_LOG_LINES = 25


def curves_part(run: RecordedRun, said: Sequence[Notice], findings: Markup | str = "") -> Markup:
    """Show the verdict, the problems of the run, and its curves. `findings`: what `findings_part` made, if it is known
    by now."""
    return drawn(
        "curves.html",
        run=run,
        headline=headline(run).replace("->", "→"),
        tiles=tiles(run),
        said=said,
        findings=findings,
        begun="" if run.metrics else "\n".join(run.log[-_LINES_AT_START:]),
        note=curves_note(run),
        shown=chain(charts_of(run), filter(None, [time_chart(run)])),  # one by one: each has all its points
    )


def findings_part(found: Sequence[Symptom]) -> Markup:
    """Make a table of the faults, each with the step that showed it first."""
    return drawn("findings.html", found=found)


def rollouts_part(files: Sequence[GroupFile], step_count: int, album: Album) -> Markup:
    """Show some groups of the steps that were chosen out of `step_count`."""
    groups = [group for file in files for group in file.groups]
    return drawn(
        "rollouts.html",
        steps=[shown_step(file, album) for file in files],
        step_count=step_count,
        marks=legend_of(groups),
        has_teacher=any(completion.teacher for group in groups for completion in group.completions),
        album=album,
    )


def held_out_part(files: Sequence[GroupFile], album: Album) -> Markup:
    """Show held-out rows at the first and the last evaluation, and what cannot be read."""
    shown = [file for file in files if file.groups]
    said = [warning(file.problem) for file in files if file.problem]
    return drawn("heldout.html", found=held_out_of(shown[0], shown[-1]) if shown else None, said=said, album=album)


def times_part(run: RecordedRun) -> Markup:
    """Show where the time of the steps went."""
    return drawn("times.html", times=times_of(run), chart=time_chart(run))


def details_part(run: RecordedRun, most: int) -> Markup:
    """Show rejected rows, `most` of them, the recipe, the environment and the end of the log."""
    log = [line if len(line) <= 500 else f"{line[:500]} …" for line in run.log[-_LOG_LINES:]]
    return drawn("details.html", run=run, most=most, log=log, facts=list(facts(run)), versions=list(versions(run)))
