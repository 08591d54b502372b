"""Rollouts as cards: those that a reader asked for, and one row through all its steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from markupsafe import Markup
from PIL import Image

from tiercel.runs.pictures import has_visible_pixels
from tiercel.runs.records import Folder, GroupRecord
from tiercel.web.report.cards import clipped, judged_of, totals_of
from tiercel.web.report.charts import Chart, Series
from tiercel.web.report.pictures import Album, Embedded
from tiercel.web.report.rollouts import GroupCard, group_card, legend_of
from tiercel.web.report.templates import drawn
from tiercel.web.report.tokens import read_tokens
from tiercel.web.view.filters import FOLDER_TITLES, Found, GroupFilter, StepFiles, positions
from tiercel.web.view.groups import FOLDERS, Columns, Groups

_STEPS_SHOWN = 60  # of a row
_STYLES = {True: "right", False: "wrong", None: ""}


class LinkedAlbum(Album):
    """The run's images at addresses of the page's server, so the page may have any number of them."""

    def __init__(self, run: Path, name: str) -> None:
        """`name`: of the run, as the server knows it."""
        super().__init__(run / "images")
        self._name = name

    def take(self, sha256: str, came_back: bool = False) -> Embedded | None:
        """Return a picture's address; None if it cannot be read."""
        return self._read(sha256)

    def _shown(self, image: Image.Image, sha256: str) -> Embedded:
        address = f"images/{sha256}?run={quote(self._name, safe='')}"
        return Embedded(href=address, is_small=has_visible_pixels(image.size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A group of a step."""

    folder: Folder
    step: int
    card: GroupCard


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """A row through all its `count` steps, of which the last are in `steps`."""

    folder: Folder
    chart: Chart | None
    count: int
    steps: Sequence["StepAnswers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAnswers:
    """What the page says of a row's group at one step, without the group itself, which may be large."""

    step: int
    totals: list[float]  # of the completions that have one
    judged: list[bool]  # likewise
    answers: list[tuple[str, str, int]]  # as `answers_of` has them


def cards_part(run: Path, name: str, columns: Columns, wanted: GroupFilter, found: Found) -> Markup:
    """Show what was found."""
    items = [item_of(run, wanted.folder, *each) for each in _groups(run, wanted.folder, columns, found.positions)]
    return drawn(
        "found.html",
        found=found,
        items=items,
        marks=legend_of([item.card.group for item in items]),
        folder=wanted.folder,
        has_groups=len(columns) > 0,
        album=LinkedAlbum(run, name),
    )


def _groups(run: Path, folder: Folder, columns: Columns, at: Sequence[int]) -> Iterator[tuple[int, GroupRecord]]:
    with StepFiles(run, folder, columns) as files:
        for position in at:
            if (group := files.group(position)) is not None:
                yield int(columns.steps[position]), group


def item_of(run: Path, folder: Folder, step: int, group: GroupRecord) -> Item:
    """Return a group as the page shows it."""
    tokens = read_tokens(run, step).get(group.index) if folder == "rollouts" else None
    return Item(folder=folder, step=step, card=group_card(group, tokens))


def row_part(run: Path, name: str, groups: Groups, id: str) -> Markup:
    """Show one row through all steps: its rewards, what was answered, and its newest group whole."""
    histories: list[History] = []
    newest: list[Item] = []
    for folder in FOLDERS:
        columns = groups.columns(folder)
        if len(at := positions(columns, GroupFilter(order="oldest", row=id))):
            steps = list[StepAnswers]()
            last: tuple[int, GroupRecord] | None = None
            for last in _groups(run, folder, columns, at[-_STEPS_SHOWN:].tolist()):
                step, group = last
                totals, judged = totals_of(group), judged_of(group)
                steps.append(StepAnswers(step=step, totals=totals, judged=judged, answers=answers_of(group)))
            chart = _row_chart(columns, folder, at)
            histories.append(History(folder=folder, chart=chart, count=len(at), steps=steps))
            newest += [] if last is None else [item_of(run, folder, *last)]
    return drawn(
        "row.html",
        id=id,
        count=sum(history.count for history in histories),
        histories=histories,
        newest=max(newest, key=lambda item: item.step, default=None),
        titles=FOLDER_TITLES,
        album=LinkedAlbum(run, name),
    )


def _row_chart(columns: Columns, folder: Folder, at: np.ndarray) -> Chart | None:
    values = {"mean": columns.mean[at]}
    if folder == "rollouts":
        values |= {"best": columns.best[at], "worst": columns.worst[at]}
    is_known = np.isfinite(list(values.values())).all(axis=0)
    steps = columns.steps[at][is_known].tolist()
    series = (
        Series(
            label=label, points=tuple(zip(steps, each[is_known].tolist(), strict=True)), style="points", colour=colour
        )
        for colour, (label, each) in enumerate(values.items())
    )
    return Chart(title=f"Reward, {FOLDER_TITLES[folder]}", series=tuple(series)) if steps else None


def answers_of(group: GroupRecord) -> list[tuple[str, str, int]]:
    """Count equal answers, the most frequent first: a style, an answer and how often. Each has the verdict of the first
    that gave it."""
    answers = [group.answer_of(each) for each in group.completions]
    verdicts = {answer: each.is_correct for answer, each in zip(answers[::-1], group.completions[::-1], strict=True)}
    return [
        (_STYLES[verdicts[answer]], clipped(answer, 160), count) for answer, count in Counter(answers).most_common()
    ]
