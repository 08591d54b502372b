"""The runs below a folder: state, step, best held-out score, and what stopped each."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tiercel.config.yaml_text import MOST_BYTES
from tiercel.errors import RunError
from tiercel.regular_files import LARGEST_FILE, bounded_lines, open_regular, read_text
from tiercel.runs.ending import RunEnding, State, ending_of
from tiercel.runs.recipe import is_run
from tiercel.runs.records import finite
from tiercel.web.report.files import end_of_log, mapping_of, yaml_value
from tiercel.web.report.metrics import GrowingMetrics, Metrics
from tiercel.web.report.numbers import Point, ends, pair
from tiercel.web.report.reading import FIRST_LINE, RecordedRun, read_run
from tiercel.web.report.verdict import HELD_OUT

TRAINED = {"reward/mean": max, "loss": min}  # what a run learns by, and what the best of it is
DEEPEST = 4  # folders between the one that is given and a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The best held-out number of a run, and the newest."""

    name: str
    best: float
    step: int  # of the best
    newest: float

    @property
    def text(self) -> str:
        """Return it in words, with the newest if that is another."""
        best, newest = pair(self.best, self.newest)
        now = "" if best == newest else f", now {newest}"
        return f"{self.name} {best} at step {self.step:,}{now}"


class Training(Score):
    """What a run learns by, over its training steps: the mean of the newest steps, and the best single one."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """Return it in words."""
        newest, best = pair(self.newest, self.best)
        return f"{self.name} {newest}, best {best} at step {self.step:,}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRun:
    """A run in the list."""

    path: str
    kind: str = ""  # the verb
    state: State = "failed"
    step: int = 0
    steps: int | None = None  # to make; None if the run has not come so far as to know
    score: Score | None = None
    training: Training | None = None
    learning_rate: float | None = None
    changed: float = 0.0  # seconds since 1970
    reason: str = ""  # what stopped it, or why it cannot be read; empty if nothing is wrong


def runs_below(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """Yield the run directories at or up to `depth` folders below a folder, by name. Runs inside runs, hidden folders
    and folders that may not be read are left out; links to folders are followed."""
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.name[0] != "." and _is_folder(entry))
    except OSError:
        return
    for path in inside:
        if depth > 1 or is_run(path):
            yield from runs_below(path, depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """A link in a circle, or into a folder that may not be entered, leads to none; is_dir raises an error for it."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def listed(folders: list[Path]) -> list[ListedRun]:
    """List the runs below the folders, the one that changed last at the end. Raises RunError if a folder is not
    there."""
    for folder in folders:
        if not os.path.isdir(folder):
            raise RunError(f"{folder} is not a folder; name one that holds runs, or a run")
    paths = dict.fromkeys(path for folder in folders for path in runs_below(folder))
    return sorted(map(_entry, paths), key=lambda entry: entry.changed)


def run_ending(run: RecordedRun) -> RunEnding:
    """Tell the state of a run. Raises OSError if it cannot be read."""
    ending, is_whole = ending_of(run.path), run.total_steps is not None and run.last_step >= run.total_steps
    if ending.state == "killed" and is_whole and (run.path / "report.html").exists():
        return RunEnding(state="done")  # of an older version, which left no end.json
    return ending


def _entry(path: Path) -> ListedRun:
    changed = 0.0
    try:
        changed = max(os.lstat(file).st_mtime for file in (path, path / "config.yaml", *path.glob("*.jsonl")))
        run = _read(path)
    except (RunError, OSError) as error:
        return ListedRun(path=str(path), changed=changed, reason=str(error))
    try:
        ending = run_ending(run)
    except OSError as error:
        ending = RunEnding(state="failed", reason=str(error))
    return ListedRun(
        path=str(path),
        kind=run.kind,
        state=ending.state,
        step=run.last_step,
        steps=run.total_steps,
        score=_score(run),
        training=_training(run),
        learning_rate=finite(run.setting("optim", "lr")),
        changed=changed,
        reason=ending.reason,
    )


def _read(path: Path) -> RecordedRun:
    with suppress(OSError):
        if (run := read_briefly(path, (*HELD_OUT, *TRAINED))) is not None:
            return run
    return read_run(path)


def _score(run: RecordedRun) -> Score | None:
    for key, name in HELD_OUT.items():
        if points := run.series(key):
            step, best = _best(points, min if key == "eval/loss" else max)
            return Score(name=name.removeprefix("held-out "), best=best, step=step, newest=points[-1][1])
    return None


def _training(run: RecordedRun) -> Training | None:
    """Return the reward of the sampled completions, or else the loss."""
    for key, choose in TRAINED.items():
        if points := run.series(key):
            step, best = _best(points, choose)
            return Training(name=key.partition("/")[0], newest=ends(points)[1], best=best, step=step)
    return None


def _best(points: Sequence[Point], choose: Callable[..., Point]) -> Point:
    return choose(points, key=itemgetter(1))


_LONGEST_SECTIONS = 1 << 13  # characters
_SECTIONS = re.compile(r"^(?:train|optim):[^\n]*\n(?:[ -][^\n]*\n)*", re.MULTILINE)


def read_briefly(path: Path, keys: Sequence[str]) -> RecordedRun | None:
    """Read what the list shows of a run: of metrics.jsonl a few numbers of each row, of config.yaml two sections.

    It takes what training writes: lines that begin with a step, without a backslash or a list. There `"loss": ` can
    only be a key of the row. None if a file has another form, which is left to `read_run`. Raises OSError if one cannot
    be read.
    """
    text = read_text(path / "config.yaml", MOST_BYTES)
    kind, recipe = FIRST_LINE.match(text), _recipe(text)
    if kind is None or recipe is None:
        return None
    with suppress(ValueError):
        log = () if isinstance(recipe["train"].get("steps"), int) else end_of_log(path / "log.txt")
        metrics = _metrics(path / "metrics.jsonl", keys)
        run = RecordedRun(path=path, kind=kind[1], recipe=recipe, metrics=metrics, log=log)
        return run if run.total_steps is not None else None
    return None


def _recipe(text: str) -> Mapping[str, Any] | None:
    found = "".join(_SECTIONS.findall(text))
    if len(found) > _LONGEST_SECTIONS or any(mark in found for mark in "&*[{"):
        return None
    recipe = mapping_of(yaml_value, found) or {}
    return recipe if all(isinstance(recipe.get(name), dict) for name in ("train", "optim")) else None


def _metrics(file: Path, keys: Sequence[str]) -> Metrics:
    """Return the numbers under these keys. Raises ValueError if a line has another form."""
    pairs = re.compile(rf'"(?:step|{"|".join(map(re.escape, keys))})": [^,}}]+'.encode())
    rows, metrics = list[bytes](), GrowingMetrics()
    if file.exists():
        with open_regular(file, LARGEST_FILE) as stream:
            for line in bounded_lines(stream, file):
                is_row = line.startswith(b'{"step": ') and line.endswith(b"}\n") and line.count(b"{") == 1
                if not is_row or b"\\" in line or b"[" in line:
                    raise ValueError(line)
                rows.append(b"{%b}" % b",".join(pairs.findall(line)))
    for row in json.loads(b"[%b]" % b",".join(rows)):
        metrics.add(row)
    return metrics.now()
