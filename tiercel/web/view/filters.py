"""Which groups a reader wants: filters and orders on the columns, and a search through the bytes of the texts."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from tiercel.regular_files import LONGEST_LINE
from tiercel.runs.records import Folder, GroupRecord, groups_path
from tiercel.runs.step_files import open_step
from tiercel.web.report.files import parsed_lines
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
        values = _measured(columns, wanted.measure)
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


def _measured(columns: Columns, measure: str) -> np.ndarray:
    known = {"best": columns.best, "mean": columns.mean, "worst": columns.worst, **columns.rewards}
    return known.get(measure, np.full(len(columns), np.nan))


def find(
    run: Path, columns: Columns, wanted: GroupFilter, *, after: tuple[int, int] | None, most: int, seconds: float
) -> Found:
    """Return at most `most` groups that follow the one at (step, place) `after`. With a text they are read one after
    the other, for at most about `seconds`."""
    chosen = positions(columns, wanted)
    start = 0
    if after is not None:
        at = np.flatnonzero((columns.steps[chosen] == after[0]) & (columns.places[chosen] == after[1]))
        start = int(at[0]) + 1 if len(at) else len(chosen)
    if not wanted.text:
        part = chosen[start : start + most]
        return _found(columns, chosen, part.tolist(), start + len(part))
    hits: list[int] = []
    until, looked_at = time.monotonic() + seconds, start
    with StepFiles(run, wanted.folder) as files:
        holds = _searching(wanted.text)
        for position in map(int, chosen[start:]):
            if len(hits) >= most or (looked_at > start and time.monotonic() > until):
                break
            looked_at += 1
            if holds(files.line(columns, position)):
                hits.append(position)
    return _found(columns, chosen, hits, looked_at)


def _found(columns: Columns, chosen: np.ndarray, hits: Sequence[int], looked_at: int) -> Found:
    last = chosen[looked_at - 1] if looked_at else None
    cursor = None if last is None else (int(columns.steps[last]), int(columns.places[last]))
    return Found(positions=tuple(hits), total=len(chosen), looked_at=looked_at, cursor=cursor)


class StepFiles(ExitStack):
    """The files of rollouts/ or evaluations/, of which the last one read stays open; a context manager."""

    def __init__(self, run: Path, folder: Folder) -> None:
        super().__init__()
        self._run = run
        self._folder: Folder = folder
        self._step = -1

    def line(self, columns: Columns, position: int) -> bytes:
        """Return the bytes of a group; none if its file cannot be read."""
        step = int(columns.steps[position])
        try:
            if step != self._step:
                self.close()
                self._step = -1
                self._stream = self.enter_context(open_step(groups_path(self._run, self._folder, step)))
                self._step = step
            self._stream.seek(int(columns.starts[position]))
            return self._stream.read(min(int(columns.bytes[position]), LONGEST_LINE))
        except (OSError, ValueError, OverflowError):  # a number of the index may be any
            return b""


def _searching(text: str) -> Callable[[bytes], bool]:
    """Return what says whether a line has a text in its question, answers or ids. Letters of ASCII match in both
    cases."""
    written = json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", errors="replace").lower()
    plain = text.encode("utf-8", errors="replace").lower()

    def holds(line: bytes) -> bool:
        if written not in line.lower():
            return False
        records = parsed_lines(line.decode("utf-8", errors="replace"))  # several, if the index is of an older file
        texts = (found for record in records for found in _texts(record))
        return any(plain in found.encode("utf-8", errors="replace").lower() for found in texts)

    return holds


def _texts(record: Any) -> Iterator[str]:
    if isinstance(record, dict):
        completions = [each for each in record.get("completions") or () if isinstance(each, dict)]
        turns = [turn for each in completions for turn in each.get("turns") or () if isinstance(turn, dict)]
        values: Sequence[Any] = [record.get("id"), record.get("question"), record.get("answer")]
        values = [*values, *(each.get("text") for each in completions)]
        values = [*values, *(turn.get(name) for turn in turns for name in ("text", "answer"))]
        yield from (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for value in values
            if value is not None
        )


def read_group(files: StepFiles, columns: Columns, position: int) -> GroupRecord | None:
    """Read one group; None if its line cannot be read, as for a moment while a run is cut."""
    values = parsed_lines(files.line(columns, position).decode("utf-8", errors="replace"))
    try:
        return GroupRecord.from_json(values[0]) if values else None
    except ValueError:
        return None


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
