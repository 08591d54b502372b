"""The parts of the page that show one run, drawn as report.html draws them."""

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

from tiercel.runs.records import finite
from tiercel.web.report.cards import text_block
from tiercel.web.report.charts import line_chart
from tiercel.web.report.curves import PHASES, curves_section, time_chart
from tiercel.web.report.details import (
    bad_rows_section,
    environment_section,
    log_section,
    recipe_section,
    reproduce_section,
)
from tiercel.web.report.heldout import held_out_section
from tiercel.web.report.markup import Html, aside, element, fragment, section, side_head, table
from tiercel.web.report.numbers import NOTHING, duration
from tiercel.web.report.page import notices_block, tiles_block
from tiercel.web.report.reading import Run, read_groups
from tiercel.web.report.verdict import notices, progress, warning
from tiercel.web.view.cards import LinkedAlbum
from tiercel.web.view.ranks import ranks_block, state_of

_STEPS_SHOWN = 12
_BAR = (600, 14)  # pixels of the bar of a step's time
_BAD_ROWS_SHOWN = 500
_LOG_LINES, _LOG_CHARACTERS = 12, 4000  # shown before the first step
_OTHER = "other"


def status_line(run: Run) -> Html:
    """Show in one line how the run stands."""
    state, why = state_of(run)
    seconds = [value for row in run.metrics[-20:] if (value := finite(row.get("time/step"))) is not None]
    left = ""
    if state == "running" and run.total_steps and seconds:
        left = f", about {duration(sum(seconds) / len(seconds) * max(0, run.total_steps - run.last_step))} left"
    doing = f" ({why})" if state in ("running", "silent") else ""
    return fragment(
        element("i", class_=f"pulse {state}"), element("b", state), f"{doing} · {run.kind}, {progress(run)}{left}"
    )


def overview(run: Run) -> Html:
    """Show the verdict, the problems of the run, and its curves. The script asks for the findings afterwards."""
    state = [notice for notice in notices(run) if not notice.text.startswith("The run is not at its end")]
    later = element("div", class_="findings", data_part="findings")
    is_new = bool(run.log) and not run.metrics
    begun = text_block("\n".join(run.log[-_LOG_LINES:]), longest=_LOG_CHARACTERS) if is_new else None
    return fragment(tiles_block(run), notices_block(state), later, begun, curves_section(run))


def held_out(run: Run, name: str) -> Html:
    """Show held-out rows at the first and the last evaluation."""
    steps = run.evaluation_steps
    files = [read_groups(run, "evaluations", step) for step in dict.fromkeys(steps[:1] + steps[-1:])]
    shown = [file for file in files if file.groups]
    odd = notices_block([warning(file.problem) for file in files if file.problem])
    if not shown:
        return fragment(odd, element("p", "No held-out row is recorded yet."))
    return fragment(odd, held_out_section(shown[0], shown[-1], LinkedAlbum(run.path, name)))


def ranks_page(run: Run) -> Html:
    """Show what the ranks do, and where the time of each step went."""
    return fragment(section("ranks", "Ranks", ranks_block(run)), _time_section(run))


def details(run: Run) -> Html:
    """Show rejected rows, the recipe, the environment and the end of the log."""
    rejected = bad_rows_section(run, _BAD_ROWS_SHOWN) or section("rejected", "Rejected rows", element("p", "None."))
    return fragment(rejected, recipe_section(run), log_section(run), environment_section(run), reproduce_section(run))


def _time_section(run: Run) -> Html | None:
    taken = run.series("time/step")
    if not taken:
        return None
    newest = [run.metrics.of_step(step) for step, _ in taken[: -_STEPS_SHOWN - 1 : -1]]
    keys = [key for key in PHASES if any(finite(row.get(key)) for row in newest)]
    slowest = [run.metrics.of_step(step) for step, _ in nlargest(_STEPS_SHOWN // 2, taken, key=itemgetter(1))]
    chart = time_chart(run)
    longest = max(row["time/step"] for row in [*newest, *slowest])
    names = [*(PHASES[key] for key in keys), _OTHER]
    return section(
        "time",
        "Where the time went",
        element("div", line_chart(chart) if chart is not None else None, class_="charts"),
        element("h3", "Newest steps"),
        _time_table(newest, keys, names, longest),
        element("h3", "Slowest steps"),
        _time_table(slowest, keys, names, longest),
        aside("Bars of both tables have the same scale. Evaluations and saving are not part of a step's time."),
    )


def _time_table(rows: Sequence, keys: Sequence[str], names: Sequence[str], longest: float) -> Html:
    shown = []
    for row in rows:
        parts = [finite(row.get(key)) or 0.0 for key in keys]
        parts.append(max(0.0, row["time/step"] - sum(parts)))
        values = [f"{value:.2f} s" if value >= 0.005 else NOTHING for value in parts]
        bar = element("td", _bar(parts, longest), class_="bar")
        shown.append((side_head(f"{row['step']:,}"), duration(row["time/step"]), bar, *values))
    return table(shown, ("step", "in all", "", *names), "plain times")


def _bar(parts: Sequence[float], longest: float) -> Html:
    width, height = _BAR
    drawn, x = [], 0.0
    for number, value in enumerate(parts):
        share = value / longest * width if longest else 0.0
        drawn.append(element("rect", x=x, y=0, width=max(0.0, share - 1), height=height, class_=f"part c{number}"))
        x += share
    return element("svg", drawn, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", aria_hidden="true")
