"""Rollouts as cards: those that a reader asked for, and one row through all its steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from tiercel.rewards.answers import extract_answer
from tiercel.runs.pictures import has_visible_pixels, picture_file
from tiercel.runs.records import Folder, GroupRecord
from tiercel.web.report.cards import clipped, judged_of, mean_text, totals_of, value_text
from tiercel.web.report.charts import Chart, Series
from tiercel.web.report.numbers import NOTHING
from tiercel.web.report.pictures import UNREADABLE, Album, Embedded, in_words, opened
from tiercel.web.report.rollouts import GroupCard, group_card, legend_of
from tiercel.web.report.templates import drawn
from tiercel.web.report.tokens import read_tokens
from tiercel.web.view.filters import FOLDER_TITLES, Found, GroupFilter, StepFiles, positions, read_group
from tiercel.web.view.groups import FOLDERS, Columns, Groups

_ANSWERS_SHOWN = 4
_STEPS_SHOWN = 60  # of a row
_NOTHING = {
    "rollouts": "Nothing is sampled yet. Runs that only learn from rows never sample.",
    "evaluations": "No held-out row is recorded yet.",
}
_NO_MATCH = "No group fits these filters."
_STYLES = {True: "right", False: "wrong", None: ""}


class LinkedAlbum(Album):
    """The run's images at addresses of the page's server, so the page may have any number of them."""

    def __init__(self, run: Path, name: str) -> None:
        """`name`: of the run, as the server knows it."""
        super().__init__(run / "images")
        self._name = name

    def take(self, sha256: str, came_back: bool = False) -> Embedded | None:
        """Return a picture's address; None if it cannot be read."""
        try:
            with opened(file := picture_file(self._folder, sha256)) as image:
                is_small = has_visible_pixels(image.size)
        except UNREADABLE as error:
            self.missing[sha256] = f"{file.name}: {in_words(error)}"
            return None
        return Embedded(href=f"images/{sha256}?run={quote(self._name, safe='')}", is_small=is_small)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A group of a step."""

    folder: Folder
    step: int
    card: GroupCard

    @property
    def numbers(self) -> str:
        """Return its rewards in words."""
        totals, judged = totals_of(self.card.group), judged_of(self.card.group)
        said = [f"mean {mean_text(totals)}"] if totals else ["all masked"]
        if len(totals) > 1:
            said.append(f"{value_text(min(totals))} to {value_text(max(totals))}")
        if judged:
            said.append(f"{sum(judged)} of {len(judged)} right")
        return ", ".join(said)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersOfStep:
    """What was answered to a row at a step: a style, an answer and how often, the most frequent first."""

    step: int
    mean: str
    right: str
    tally: Sequence[tuple[str, str, int]]
    more: int  # other answers


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A row through all its steps, of which the last `most` are in `rows`."""

    folder: Folder
    chart: Chart | None
    count: int
    rows: Sequence[AnswersOfStep]
    most: int = _STEPS_SHOWN


def cards_part(run: Path, name: str, columns: Columns, wanted: GroupFilter, found: Found) -> Markup:
    """Show what was found."""
    items = [
        item_of(run, wanted.folder, step, group)
        for step, group in _groups(run, wanted.folder, columns, found.positions)
    ]
    return drawn(
        "found.html",
        found=found,
        items=items,
        marks=legend_of([item.card.group for item in items]),
        nothing=_NO_MATCH if len(columns) else _NOTHING[wanted.folder],
        album=LinkedAlbum(run, name),
    )


def _groups(run: Path, folder: Folder, columns: Columns, at: Sequence[int]) -> Iterator[tuple[int, GroupRecord]]:
    with StepFiles(run, folder) as files:
        for position in at:
            if (group := read_group(files, columns, position)) is not None:
                yield int(columns.steps[position]), group


def item_of(run: Path, folder: Folder, step: int, group: GroupRecord) -> Item:
    """Return a group as the page shows it."""
    tokens = read_tokens(run, step).get(group.index) if folder == "rollouts" else None
    return Item(folder=folder, step=step, card=group_card(group, tokens))


def row_part(run: Path, name: str, groups: Groups, id: str) -> Markup:
    """Show one row through all steps: its rewards, what was answered, and its newest group whole."""
    found = [(folder, columns, at) for folder in FOLDERS if len(at := _of_row(columns := groups.columns(folder), id))]
    newest = None
    if found:
        folder, columns, at = max(found, key=lambda each: each[1].steps[each[2][-1]])
        last = list(_groups(run, folder, columns, [int(at[-1])]))
        newest = item_of(run, folder, *last[0]) if last else None
    return drawn(
        "row.html",
        id=id,
        count=sum(len(at) for _, _, at in found),
        histories=[_history(run, *each) for each in found],
        newest=newest,
        titles=FOLDER_TITLES,
        album=LinkedAlbum(run, name),
    )


def _of_row(columns: Columns, id: str) -> np.ndarray:
    return positions(columns, GroupFilter(order="oldest", row=id))


def _history(run: Path, folder: Folder, columns: Columns, at: np.ndarray) -> History:
    groups = _groups(run, folder, columns, at[-_STEPS_SHOWN:].tolist())
    rows = [_answers(step, group) for step, group in groups]
    return History(folder=folder, chart=_row_chart(columns, folder, at), count=len(at), rows=rows)


def _row_chart(columns: Columns, folder: Folder, at: np.ndarray) -> Chart | None:
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
    return Chart(title=f"Reward, {FOLDER_TITLES[folder]}", series=tuple(series)) if series else None


def _answers(step: int, group: GroupRecord) -> AnswersOfStep:
    """Count equal answers; each has the verdict of the first that gave it."""
    verdicts = {extract_answer(each.text): each.is_correct for each in reversed(group.completions)}
    counts = Counter(extract_answer(each.text) for each in group.completions).most_common()
    judged = judged_of(group)
    return AnswersOfStep(
        step=step,
        mean=mean_text(totals_of(group)),
        right=f"{sum(judged)} of {len(judged)}" if judged else NOTHING,
        tally=[(_STYLES[verdicts[answer]], clipped(answer, 160), n) for answer, n in counts[:_ANSWERS_SHOWN]],
        more=len(counts[_ANSWERS_SHOWN:]),
    )
