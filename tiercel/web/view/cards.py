"""Rollouts as cards: a page of those that a reader asked for, and one row through all its steps."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from tiercel.rewards.answers import extract_answer
from tiercel.runs.records import Folder, GroupRecord, GroupTokens
from tiercel.web.report.cards import clipped, value_text
from tiercel.web.report.charts import Chart, Series, line_chart
from tiercel.web.report.markup import Html, aside, element, fragment, side_head, table
from tiercel.web.report.numbers import NOTHING, TIMES
from tiercel.web.report.pictures import UNREADABLE, Album, Embedded, has_boxes, has_visible_pixels, in_words, opened
from tiercel.web.report.rollouts import boxes_legend, group_card
from tiercel.web.report.turns import is_asked
from tiercel.web.view.filters import Found, GroupFilter, StepFiles, positions, read_group
from tiercel.web.view.groups import FOLDERS, Columns, Groups
from tiercel.web.view.tokens import CHOICES, choices_of, marked_tokens, read_tokens
from tiercel.wording import counted

_ANSWERS_SHOWN = 4
_STEPS_SHOWN = 60  # of a row
_NOTHING = {
    "rollouts": "Nothing is sampled yet. Runs that only learn from rows never sample.",
    "evaluations": "No held-out row is recorded yet.",
}
_NO_MATCH = "No group fits these filters."
_FOLDER_TITLES = {"rollouts": "sampled", "evaluations": "held out"}


class LinkedAlbum(Album):
    """The run's images at addresses of the page's server, so the page may have any number of them."""

    def __init__(self, run: Path, name: str) -> None:
        """`name`: of the run, as the server knows it."""
        super().__init__(run / "images")
        self._name = name

    def take(self, sha256: str, came_back: bool = False) -> Embedded | None:
        """Return a picture's address; None where it cannot be read."""
        try:
            with opened(self._folder / f"{sha256}.png") as image:
                is_small = has_visible_pixels(image.size)
        except UNREADABLE as error:
            self.missing[f"{sha256}.png"] = in_words(error)
            return None
        return Embedded(href=f"images/{sha256}?run={quote(self._name, safe='')}", is_small=is_small)


def cards_page(run: Path, name: str, columns: Columns, wanted: GroupFilter, found: Found) -> Html:
    """Show what was found. The attributes of the block tell the script how to go on."""
    cards, groups = [], []
    with StepFiles(run, wanted.folder) as files:
        for position in found.positions:
            group = read_group(files, columns, position)
            if group is not None:
                groups.append(group)
                cards.append(group_item(run, name, wanted.folder, int(columns.steps[position]), group))
    boxed, asked = any(map(has_boxes, groups)), any(map(is_asked, groups))
    return element(
        "div",
        boxes_legend(boxed, asked) if boxed or asked else None,
        None if found.total else element("p", _NO_MATCH if len(columns) else _NOTHING[wanted.folder]),
        cards,
        class_="found",
        data_cursor="{}.{}".format(*found.cursor) if found.cursor else None,
        data_total=found.total,
        data_looked_at=found.looked_at,
        data_is_over=str(found.is_over).lower(),
    )


def group_item(run: Path, name: str, folder: Folder, step: int, group: GroupRecord) -> Html:
    """Show a group with its step, a way to its row, and the choice of its tokens' colours."""
    tokens: GroupTokens | None = read_tokens(run, step).get(group.index) if folder == "rollouts" else None
    choices = choices_of(group, tokens)
    options = [element("option", CHOICES[choice], value=choice) for choice in choices]
    chooser = element("label", "colour by ", element("select", options, class_="colours")) if choices else None
    where = f"step {step:,}" + (" (held out)" if folder == "evaluations" else f", policy {group.policy_version:,}")
    return element(
        "div",
        element(
            "div",
            element("button", where, class_="to-step", data_step=step, data_folder=folder, title="all of this step"),
            element(
                "button",
                group.id,
                type="button",
                class_="to-row",
                data_row=_encoded(group.id),
                title="this row, all steps",
            ),
            _numbers(group),
            chooser,
            class_="item-head",
        ),
        group_card(group, LinkedAlbum(run, name), marked_tokens(group, tokens)),
        class_="item",
        tabindex="-1",
        data_step=step,
    )


def _encoded(id: str) -> str:
    """Encode an id for the script: what is escaped for the eye would no longer be the id."""
    return quote(id, safe="", errors="replace")


def _numbers(group: GroupRecord) -> Html:
    totals = [each.total for each in group.completions if each.total is not None]
    judged = [each.is_correct for each in group.completions if each.is_correct is not None]
    said = [f"mean {value_text(sum(totals) / len(totals))}"] if totals else ["all masked"]
    if len(totals) > 1:
        said.append(f"{value_text(min(totals))} to {value_text(max(totals))}")
    if judged:
        said.append(f"{sum(judged)} of {len(judged)} right")
    return element("span", ", ".join(said), class_="item-numbers")


def row_page(run: Path, name: str, groups: Groups, id: str) -> Html:
    """Show one row through all steps: its rewards, what was answered, and its newest group whole."""
    found = [(folder, columns, at) for folder in FOLDERS if len(at := _of_row(columns := groups.columns(folder), id))]
    if not found:
        return element("p", f"No group of a row {id!r} is known yet.")
    folder, columns, at = max(found, key=lambda each: each[1].steps[each[2][-1]])
    with StepFiles(run, folder) as files:
        newest = read_group(files, columns, int(at[-1]))
    charts = [_row_chart(columns, folder, at) for folder, columns, at in found]
    count = sum(len(at) for _, _, at in found)
    return fragment(
        element("h2", id),
        aside(f"{counted(count, 'time')} sampled or held out so far. A step leads to its group."),
        element("div", charts, class_="charts"),
        [_answers_table(run, folder, columns, at) for folder, columns, at in found],
        element("h3", "Its newest group"),
        group_item(run, name, folder, int(columns.steps[at[-1]]), newest) if newest is not None else None,
    )


def _of_row(columns: Columns, id: str) -> np.ndarray:
    return positions(columns, GroupFilter(order="oldest", row=id))


def _row_chart(columns: Columns, folder: Folder, at: np.ndarray) -> Html | None:
    def points(values: np.ndarray) -> tuple[tuple[int, float], ...]:
        by_step = zip(columns.steps[at].tolist(), values[at].tolist(), strict=True)
        return tuple((step, value) for step, value in by_step if value == value)

    named = [("mean", columns.mean)]
    if folder == "rollouts":
        named += [("best", columns.best), ("worst", columns.worst)]
    series = [
        Series(label=label, points=found, style="points", colour=colour)
        for colour, (label, values) in enumerate(named)
        if (found := points(values))
    ]
    return line_chart(Chart(title=f"Reward, {_FOLDER_TITLES[folder]}", series=tuple(series))) if series else None


def _answers_table(run: Path, folder: Folder, columns: Columns, at: np.ndarray) -> Html:
    """Show what was answered at each step, the most frequent answer first; of many steps the last ones."""
    rows = []
    with StepFiles(run, folder) as files:
        for position in at[-_STEPS_SHOWN:].tolist():
            group = read_group(files, columns, position)
            if group is not None:
                rows.append(_answers_row(int(columns.steps[position]), folder, group))
    left_out = len(at) - _STEPS_SHOWN
    note = aside(f"The last {_STEPS_SHOWN} of {counted(len(at), 'step')}." if left_out > 0 else None)
    heads = ("step", "mean", "right", "answers")
    title = element("h3", "How its answers changed ", element("small", _FOLDER_TITLES[folder]))
    return element("div", title, note, table(rows, heads, "plain answers-by-step"))


def _answers_row(step: int, folder: Folder, group: GroupRecord) -> Html:
    totals = [each.total for each in group.completions if each.total is not None]
    judged = [each.is_correct for each in group.completions if each.is_correct is not None]
    button = element(
        "button",
        f"{step:,}",
        type="button",
        class_="to-group",
        data_step=step,
        data_folder=folder,
        data_row=_encoded(group.id),
    )
    cells: Sequence[Html | str] = (
        side_head(button),
        value_text(sum(totals) / len(totals) if totals else None),
        f"{sum(judged)} of {len(judged)}" if judged else NOTHING,
        element("td", _answers(group)),
    )
    return element("tr", [cell if isinstance(cell, Html) else element("td", cell) for cell in cells])


def _answers(group: GroupRecord) -> list[Html]:
    """Count equal answers; each with the verdict of the first that gave it."""
    right = {extract_answer(each.text): each.is_correct for each in reversed(group.completions)}
    counts = Counter(extract_answer(each.text) for each in group.completions)
    styles = {True: "right", False: "wrong", None: ""}
    shown = [
        element(
            "span",
            element("code", clipped(answer, 160) or "(empty)"),
            f" {TIMES}{count}" if count > 1 else None,
            class_=f"tally {styles[right[answer]]}",
        )
        for answer, count in counts.most_common(_ANSWERS_SHOWN)
    ]
    more = len(counts) - len(shown)
    return [*shown, element("span", f"and {counted(more, 'other')}", class_="tally")] if more > 0 else shown
