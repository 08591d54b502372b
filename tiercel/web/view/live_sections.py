"""The parts of the page that show one run, and the page around them."""

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from tiercel.web.report.page_sections import (
    TABS,
    compared_evaluations,
    curves_part,
    details_part,
    findings_part,
    held_out_part,
    times_part,
)
from tiercel.web.report.reading import RecordedRun
from tiercel.web.report.templates import drawn
from tiercel.web.report.verdict import notices
from tiercel.web.view.cards import LinkedAlbum
from tiercel.web.view.filters import FOLDER_TITLES, ORDERS
from tiercel.web.view.live import LiveRun
from tiercel.web.view.ranks import ranks_part, status_part

SCRIPTS = ("charts.js", "page.js", "live.js")
_BAD_ROWS_SHOWN = 500


def page(runs: Sequence[str]) -> str:
    """Make the page that the script fills. `runs`: their names."""
    return drawn(
        "page.html",
        title="tiercel view",
        scripts=SCRIPTS,
        runs=runs,
        status="",
        tabs=TABS,
        folders=FOLDER_TITLES,
        orders=ORDERS,
    )


def overview(run: RecordedRun) -> Markup:
    """Show the verdict, the problems of the run, and its curves. The script asks for the findings afterwards."""
    return curves_part(run, notices(run))


PARTS: Mapping[str, Callable[[LiveRun, RecordedRun], Markup]] = {
    "status": lambda live, run: status_part(run),
    "curves": lambda live, run: live.drawn(overview),
    "findings": lambda live, run: findings_part(live.symptoms()),
    "heldout": lambda live, run: held_out_part(compared_evaluations(run), LinkedAlbum(run.path, live.name)),
    "ranks": lambda live, run: ranks_part(run) + times_part(run),
    "details": lambda live, run: details_part(run, _BAD_ROWS_SHOWN),
}
