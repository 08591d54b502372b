"""Which groups a reader wants: filters and orders on the columns, and a search through the bytes of the texts."""

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from starlette.exceptions import HTTPException

from tiercel.regular_files import LONGEST_LINE
from tiercel.runs.records import Folder, GroupRecord, groups_path
from tiercel.runs.step_files import open_step
from tiercel.web.report.files import parsed_records
from tiercel.web.view.groups import FOLDERS, Columns

FOLDER_TITLES: Mapping[str, str] = {"rollouts": "sampled", "evaluations": "held out"}
ORDERS: Mapping[str, str] = {
    "newest": "newest first",
    "oldest": "oldest first",
    "worst": "worst mean reward first",
    "best": "best mean reward first",
    "spread": "most different rewards first",
    "lucky": "luckiest: one right among wrong",
    "equal": "all rewards equal",
    "masked": "with masked completions",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFilter:
    """What a reader asked for. None and empty texts mean any."""

    folder: Folder = "rollouts"
    order: str = "newest"  # of ORDERS
    measure: str = "mean"  # what `low` and `high` limit: best, mean, worst, or the name of a reward
    low: float | None = None
    high: float | None = None
    row: str = ""
    steps: tuple[int, int] | None = None  # first and last
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A part of the groups that are wanted."""

    positions: tuple[int, ...]  # in the columns
    total: int  # that match all filters but the search in texts
    looked_at: int  # of them, from the first on
    cursor: tuple[int, int] | None  # step and place of the last that was looked at

    @property
    def is_over(self) -> bool:
        return self.looked_at >= self.total


def positions(columns: Columns, wanted: GroupFilter) -> np.ndarray:
    """Return the groups that match all filters but the search in texts, in the wanted order."""
    admitted = np.ones(len(columns), dtype=bool)
    if wanted.row:
        admitted &= columns.ids == columns.codes.get(wanted.row, -1)
    if wanted.steps is not None:
        admitted &= (columns.steps >= wanted.steps[0]) & (columns.steps <= wanted.steps[1])
    if wanted.low is not None or wanted.high is not None:
        known = {"best": columns.best, "mean": columns.mean, "worst": columns.worst, **columns.rewards}
        values = known.get(wanted.measure, np.full(len(columns), np.nan))
        admitted &= values >= (-np.inf if wanted.low is None else wanted.low)
        admitted &= values <= (np.inf if wanted.high is None else wanted.high)
    spread = columns.best - columns.worst
    if wanted.order == "lucky":
        admitted &= (columns.right == 1) & (columns.judged > 1)
    elif wanted.order == "equal":
        admitted &= spread == 0
    elif wanted.order == "masked":
        admitted &= columns.masked > 0
    chosen = np.flatnonzero(admitted)
    if wanted.order != "oldest":
        chosen = chosen[np.lexsort((columns.places[chosen], -columns.steps[chosen]))]
    keys = {"worst": columns.mean, "best": -columns.mean, "spread": -spread, "lucky": -columns.judged}
    if (key := keys.get(wanted.order)) is not None:  # equal ones stay newest first; without a number last
        chosen = chosen[np.argsort(key[chosen], kind="stable")]
    return chosen


def find(
    run: Path, columns: Columns, wanted: GroupFilter, *, after: tuple[int, int] | None, most: int, seconds: float
) -> Found:
    """Return at most `most` groups that follow the one at (step, place) `after`. With a text they are read one after
    the other, for at most about `seconds`."""
    chosen, start = positions(columns, wanted), 0
    if after is not None:
        at = np.flatnonzero((columns.steps[chosen] == after[0]) & (columns.places[chosen] == after[1]))
        start = int(at[0]) + 1 if len(at) else len(chosen)
    plain, written = _lower(wanted.text), _lower(json.dumps(wanted.text, ensure_ascii=False)[1:-1])
    hits: list[int] = []
    until, looked_at = time.monotonic() + seconds, start
    with StepFiles(run, wanted.folder, columns) as files:
        for position in chosen[start:].tolist():
            if len(hits) >= most or (looked_at > start and time.monotonic() > until):
                break
            looked_at += 1
            if not wanted.text or _holds(files.line(position), plain, written):
                hits.append(position)
    last = chosen[looked_at - 1] if looked_at else None
    cursor = None if last is None else (int(columns.steps[last]), int(columns.places[last]))
    return Found(positions=tuple(hits), total=len(chosen), looked_at=looked_at, cursor=cursor)


class StepFiles(ExitStack):
    """The files of rollouts/ or evaluations/, of which the last one read stays open; a context manager."""

    def __init__(self, run: Path, folder: Folder, columns: Columns) -> None:
        super().__init__()
        self._run = run
        self._folder: Folder = folder
        self._columns = columns
        self._step = -1

    def line(self, position: int) -> bytes:
        """Return the bytes of a group; none if its file cannot be read."""
        step = int(self._columns.steps[position])
        try:
            if step != self._step:
                self.close()
                self._step = -1
                self._stream = self.enter_context(open_step(groups_path(self._run, self._folder, step)))
                self._step = step
            self._stream.seek(int(self._columns.starts[position]))
            return self._stream.read(min(int(self._columns.bytes[position]), LONGEST_LINE))
        except (OSError, ValueError, OverflowError):  # a number of the index may be any
            return b""

    def group(self, position: int) -> GroupRecord | None:
        """Read one group; None if its line cannot be read, as for a moment while a run is cut."""
        return _group_of(self.line(position))


def _group_of(line: bytes) -> GroupRecord | None:
    groups, _ = parsed_records(line.decode("utf-8", errors="replace"), GroupRecord.from_json)
    return groups[0] if groups else None  # there are several if the index is of an older file


def _holds(line: bytes, plain: bytes, written: bytes) -> bool:
    """Tell whether a group has a text, as people and as JSON write it, in its question, answers or ids. Letters of
    ASCII match in both cases."""
    group = _group_of(line) if written in line.lower() else None
    return group is not None and any(plain in _lower(text) for text in _texts(group))


def _lower(text: str) -> bytes:
    return text.encode("utf-8", errors="replace").lower()


def _texts(group: GroupRecord) -> Iterator[str]:
    yield from (group.id, group.question)
    if group.answer is not None:
        yield group.answer if isinstance(group.answer, str) else json.dumps(group.answer, ensure_ascii=False)
    for completion in group.completions:
        yield completion.text
        for turn in completion.turns:
            yield from (turn.text, turn.answer or "")


_STEPS = re.compile(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})?\s*)?")
_LONGEST = 500  # characters of a text


def wanted_of(given: Mapping[str, str]) -> GroupFilter:
    """Read the filters. Raises HTTPException, whose text is for the reader of the page."""
    folder, order = given.get("folder") or "rollouts", given.get("order") or "newest"
    known = {name: name for name in FOLDERS}
    if folder not in known or order not in ORDERS:
        raise HTTPException(400, "There is no such kind of rows, or no such order.")
    return GroupFilter(
        folder=known[folder],
        order=order,
        measure=given.get("measure") or "mean",
        low=_number(given, "low"),
        high=_number(given, "high"),
        row=given.get("row", "").strip(),
        steps=_steps(given.get("steps", "")),
        text=given.get("text", "").strip()[:_LONGEST],
    )


def after_of(given: Mapping[str, str]) -> tuple[int, int] | None:
    """Read the step and the place of the last group that the page has."""
    match = re.fullmatch(r"([0-9]{1,12})\.([0-9]{1,12})", given.get("after", ""))
    return (int(match[1]), int(match[2])) if match else None


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "").strip().replace("\u2212", "-")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise HTTPException(400, f"{text} is not a number. Use a limit of the reward, such as 0.5.")
    return value


def _steps(text: str) -> tuple[int, int] | None:
    if not text.strip():
        return None
    match = _STEPS.fullmatch(text)
    if match is None:
        raise HTTPException(400, f"{text} is not a step. Use one such as 120, or several such as 100-200 or 100-.")
    last = int(match[2]) if match[2] else (10**12 if "-" in text else int(match[1]))
    return int(match[1]), last
