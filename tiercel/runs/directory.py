"""A run directory: its files, the lock that one process holds, and how a run resumes from the directory."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tiercel.config import GrpoRecipe, Recipe
from tiercel.config.yaml_text import LARGEST_TEXT, render
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.distributed.versions import installed_versions
from tiercel.errors import RecipeError, RunError
from tiercel.log import logger
from tiercel.message_text import brief
from tiercel.models.families.base import Family
from tiercel.regular_files import open_to_append, read_text
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.reliability.redaction import redact_values
from tiercel.runs.checkpoints import FoundCheckpoint, list_checkpoints, newest_valid, set_aside
from tiercel.runs.ending import LOCK, recorded_ending
from tiercel.runs.files import json_line, replacing, write_atomically
from tiercel.runs.fresh_start import clear, has_no_step, require_own
from tiercel.runs.identity import changed_files, changes, digests, is_pinned, is_rounded, may_differ
from tiercel.runs.identity import identity as identity_of
from tiercel.runs.index import FILE as INDEX
from tiercel.runs.index import add_group, append_entry, new_entry
from tiercel.runs.json_lines import Rows, cut_lines, parsed
from tiercel.runs.lock import Hold
from tiercel.runs.pictures import Background, picture_file, write_picture
from tiercel.runs.recipe import load_run_recipe
from tiercel.runs.recording import gathered_groups, group_record, images_of, pictured
from tiercel.runs.records import Folder, GroupTokens, groups_path, tokens_path
from tiercel.runs.step_files import FOLDERS as STEP_FOLDERS
from tiercel.runs.step_files import PLAIN_STEPS, pack_step, step_of
from tiercel.types import EncodedImage, ScoredGroup
from tiercel.writing import GO_ON, reading, writing

RUN = "run"  # key of the run's identity in env.json and in a checkpoint's state
ANEW = "a run with another recipe was started in this directory but finished no step; starting over"
WITHOUT_LOCKS = (
    "the file system of `output` has no locks; another process that writes to it is noticed only through "
    "pulse/writer.json, so do not start a second one"
)
FOLDERS = (*STEP_FOLDERS, "images", "checkpoints")  # folders that each run has
RecordGroups = Callable[[Sequence[ScoredGroup], Sequence[Sequence[float | None]]], list[ScoredGroup]]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run that is open for writing. All ranks call its methods. The first rank writes the files; each rank writes its
    own pictures, which exist once `finish_files` has returned."""

    path: Path
    ranks: Ranks = ALONE
    changed: tuple[str, ...] = ()  # lines about what has changed since its last start
    hold: Hold | None = None  # the first rank's hold on the directory
    identity: str | None = None  # of the recipe and the files that it started with; its checkpoints have it too
    most_pictured: int | None = None  # prompts of a step, and whether of held-out rows: `rollout.record_images`
    _background: Background = field(default_factory=Background, init=False, repr=False, compare=False)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def bad_rows_file(self) -> Path:
        return self.path / "bad_rows.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def require_held(self) -> None:
        """Raise TakenError, on the first rank, if another process has taken over the directory."""
        if self.hold is not None:
            self.hold.require()

    def record(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl and flush it. The files of the step PLAIN_STEPS earlier are compressed while
        the run continues."""

        def append() -> None:
            self.require_held()
            with writing(self.metrics_file, GO_ON), open_to_append(self.metrics_file) as file:
                file.write(json_line(row))
            if (old := row["step"] - PLAIN_STEPS) >= 0:
                self._background.do(partial(pack_step, self.path, old))

        self.ranks.run_on_first(append)

    def complete_row(self, step: int, more: Mapping[str, Any]) -> None:
        """Add values to the newest row of metrics.jsonl, which is that of `step`."""

        def replace() -> None:
            self.require_held()
            with writing(self.metrics_file, GO_ON):
                row = {**Rows(self.metrics_file)[-1], **more}
                cut_lines(self.metrics_file, step - 1, json_line(row).encode("utf-8"))

        self.ranks.run_on_first(replace)

    @contextmanager
    def recording(self, folder: Folder, step: int, family: Family) -> Iterator[RecordGroups]:
        """Yield what adds groups and their advantages to a step's file of rollouts/ or evaluations/, which has its name
        once all are added, and writes each image of `pictured` groups once. All ranks call it equally often. The first
        rank gets the groups of all ranks, in the global order and without pixels; the others get an empty list."""
        file, space = groups_path(self.path, folder, step), family.coordinate_space
        entry, size, new = new_entry(folder, step), 0, ExitStack()
        opened = cache(lambda: new.enter_context(replacing(file)))  # only the first rank calls it

        def record(scored: Sequence[ScoredGroup], advantages: Sequence[Sequence[float | None]]) -> list[ScoredGroup]:
            self.ranks.heartbeat.beat()
            everyone = gathered_groups(self.ranks, scored, advantages)
            records = [group_record(group, values, space).as_json() for group, values in everyone]

            def write() -> frozenset[int]:
                nonlocal size
                self.require_held()
                with writing(file, GO_ON):
                    for each in records:
                        line = json_line(each).encode("utf-8")
                        opened().write(line)
                        add_group(entry, size, len(line), each)
                        size += len(line)
                return pictured([group.group for group, _ in everyone], self.most_pictured, folder)

            chosen = self.ranks.run_on_first(write)
            for group in (each.group for each in scored if each.group.prompt.index in chosen):
                self.ranks.heartbeat.beat()
                for image in images_of(group):
                    self.save_image(image)
            return [group for group, _ in everyone]

        def finish() -> None:
            self.require_held()
            with writing(file, GO_ON):
                opened()
                new.close()
                append_entry(self.path, entry)

        with new:
            yield record
            self.ranks.run_on_first(finish)

    def record_tokens(self, step: int, groups: Sequence[GroupTokens]) -> None:
        """Write a step's file of tokens/. `groups` are read on the first rank; without any, no file is written."""
        file = tokens_path(self.path, step)

        def write() -> None:
            if groups:
                with writing(file, GO_ON):
                    write_atomically(file, "".join(json_line(group.as_json()) for group in groups))

        self.ranks.run_on_first(write)

    def save_image(self, image: EncodedImage) -> None:
        """Save the picture that the model got, under its hash, while the step continues. Raises RunError if an earlier
        one could not be saved."""
        path = picture_file(self.path / "images", image.sha256)
        temporary = path.with_suffix(f".{self.ranks.rank}.tmp")
        self._background.do(partial(write_picture, path, image.views[0].numpy(), temporary), path)

    def finish_files(self) -> None:
        """Wait until this rank's pictures are saved and its old files are compressed. Raises RunError on failure."""
        self._background.finish()


@contextmanager
def open_run(recipe: Recipe, ranks: Ranks = ALONE) -> Iterator[RunDirectory]:
    """Create or reopen the recipe's run directory, and lock it on the first rank. Raises RunError if the directory
    contains something else or a run of another recipe that has finished a step, or if a rank cannot see it."""
    path = Path(recipe.output)
    with ExitStack() as stack:
        hold: Hold | None = None

        def opened() -> tuple[tuple[str, ...], str | None]:
            nonlocal hold
            hold, changed, identity = stack.enter_context(_held(recipe, path))
            return changed, identity

        changed, identity = ranks.run_on_first(opened)
        ranks.run_on_all(lambda: _require_seen(path))
        with ranks.heartbeat.shown_in(path / HEARTBEATS / f"rank-{ranks.rank}.json"):
            run = RunDirectory(
                path=path,
                ranks=ranks,
                changed=changed,
                hold=hold,
                identity=identity,
                most_pictured=recipe.rollout.most_pictured if isinstance(recipe, GrpoRecipe) else None,
            )
            try:
                yield run
            except BaseException:
                with suppress(RunError):  # the error that ended the run says more
                    run.finish_files()
                raise
            ranks.run_on_all(run.finish_files)


def _require_seen(path: Path) -> None:
    if not (path / "config.yaml").is_file():
        remedy = "use a directory that all ranks share"
        raise RunError(f"output: {path.absolute()} does not exist on {platform.node()}; {remedy}")


@contextmanager
def _held(recipe: Recipe, path: Path) -> Iterator[tuple[Hold, tuple[str, ...], str | None]]:
    """Hold the run. Yields the hold, lines about what has changed since the run's last start, and the run's
    identity."""
    with ExitStack() as stack:
        with writing(path, "name another `output`, or free some space there or make it writable"):
            require_own(path)
            path.mkdir(parents=True, exist_ok=True)
            hold = stack.enter_context(closing(Hold(path)))
            told = () if hold.take() else (WITHOUT_LOCKS,)
        changed = _changed(recipe, path) if (path / "config.yaml").exists() else ()
        with writing(path, GO_ON):
            if changed is None:
                clear(path)
            identity = _begin(recipe, path)
            os.utime(path / LOCK, follow_symlinks=False)  # records when the last process started
        with recorded_ending(path):
            yield hold, (*told, *((ANEW,) if changed is None else changed)), identity
            hold.require()


def _changed(recipe: Recipe, path: Path) -> tuple[str, ...] | None:
    """Return lines about what has changed since the run's last start, or None if this is another run and the directory
    has no finished step. If it has one, raises RunError, or RecipeError if the earlier recipe cannot be read."""
    try:
        told = _require_same(load_run_recipe(path), recipe, path)
        return told if has_no_step(path) else (*told, *changed_files(path, recipe))
    except (RunError, RecipeError):
        if has_no_step(path):
            return None
        raise


def _begin(recipe: Recipe, path: Path) -> str | None:
    """Write the files that every start writes, and return the run's identity, which does not change once there is a
    checkpoint. It is None if an older version started the run."""
    text = f"# tiercel {recipe.kind}\n" + render(redact_values(recipe.model_dump(mode="json")))
    if len(text) > LARGEST_TEXT:  # a run whose recipe cannot be read again could not be resumed
        size = f"has {len(text):,} characters, but a recipe may have at most {LARGEST_TEXT:,}"
        raise RecipeError([f"{size}; name its files by a pattern, such as data/*.parquet"])
    write_atomically(path / "config.yaml", text)
    for name in FOLDERS:
        (path / name).mkdir(exist_ok=True)
    for file in (path / HEARTBEATS).glob("rank-*.json"):  # left by ranks that were killed
        file.unlink(missing_ok=True)
    identity = _identity_of(path)
    if not any((path / "checkpoints").iterdir()):  # a run that starts over
        (path / "bad_rows.jsonl").unlink(missing_ok=True)
        identity = identity_of(recipe)
    described = {**redact_values(environment()), "files": digests(recipe), RUN: identity}
    write_atomically(path / "env.json", json.dumps(described, indent=1, sort_keys=True))
    return identity


def _identity_of(run: Path) -> str | None:
    """Return the identity that a run had at its last start."""
    try:
        described = json.loads(read_text(run / "env.json"))
    except (OSError, ValueError, RecursionError):
        return None
    found = described.get(RUN) if isinstance(described, dict) else None
    return found if isinstance(found, str) else None


def roll_back_to_checkpoint(
    run: RunDirectory,
    require_usable: Callable[[FoundCheckpoint], None] = lambda found: None,
) -> FoundCheckpoint | None:
    """Return the newest valid checkpoint, and remove the metrics, rollouts, evaluations and index lines of later steps.
    Newer checkpoints, which cannot be used, are set aside. Nothing is changed if `require_usable` raises. Raises
    RunError if there are checkpoints but none can be used, because starting over would lose what they contain."""
    problems: list[str] = []
    found = newest_valid(run.checkpoints, problems.append)
    if problems and found is None:
        raise RunError(
            "no checkpoint of the run can be used, and the run does not start over by itself:\n  "
            + "\n  ".join(problems)
            + "\nrestore what is missing or changed; to start over, move them away: mv "
            f"{shlex.quote(str(run.checkpoints))} {shlex.quote(str(run.checkpoints.absolute()) + '.damaged')}"
        )
    if found is not None:
        _require_of_run(run, found)
        require_usable(found)
    for problem in problems:
        logger.warning(problem)
    step = found.step if found else -1
    with writing(run.path, GO_ON):
        for newer, path in list_checkpoints(run.checkpoints):
            if newer > step and not path.is_symlink():
                logger.warning(f"checkpoint {path} is kept as {set_aside(path).name}")
        cut_lines(run.metrics_file, step)
        for folder in STEP_FOLDERS:
            for file in (run.path / folder).iterdir() if (run.path / folder).is_dir() else ():
                if (its_step := step_of(file.name)) is not None and its_step > step:
                    file.unlink()
        cut_lines(run.path / INDEX, step)
        _tell_lost_rows(run.metrics_file, step)
    return found


def _require_of_run(run: RunDirectory, found: FoundCheckpoint) -> None:
    """Raise RunError if another run has written the checkpoint."""
    other = found.state.get(RUN)
    if other is not None and run.identity is not None and other != run.identity:
        raise RunError(
            f"{found.path} belongs to another run, which began with a different recipe or other files; move it away, "
            f"or start a run from its weights in another directory (lora.init: {found.path / 'adapter'})"
        )


def _tell_lost_rows(metrics: Path, step: int) -> None:
    """Warn if the metrics lack rows that the run had recorded before it saved its checkpoint of this step."""
    newest = Rows(metrics).newest(1) if step > 0 else [{"step": step}]
    last = newest[0].get("step") if newest else "none"
    if last != step:
        logger.warning(f"{metrics} has lost rows: its last is from step {last}, but the run goes on from step {step}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl. A last line that a crash cut short is skipped. Raises RunError if any other line
    is not a row with a step."""
    rows = []
    file = path / "metrics.jsonl"
    with reading(file):
        lines = read_text(file).split("\n") if os.path.lexists(file) else []
    for number, line in enumerate(lines, start=1):
        row = parsed(line)
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif number < len(lines):
            raise RunError(f"{file}:{number} is not a row with a step: {brief(line, 80)}; correct or remove the line")
    return rows


def environment() -> dict[str, Any]:
    """Return the versions and devices for env.json, without environment variables."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": installed_versions(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _require_same(before: Recipe, now: Recipe, run: Path) -> tuple[str, ...]:
    """Return lines about what has changed. Raises RunError if the changes would make another run of it."""
    was = before.kind
    if was != now.kind:
        raise RunError(f"output: {run} is a run of `tiercel {was}`; name another directory")
    changed = changes(before, now)
    if refused := [line for key, line in changed.items() if not (may_differ(key) or is_pinned(key, before))]:
        lines = "\n  ".join(refused)
        raise RunError(
            f"output: {run} was made with a different recipe; go on with the old values, or name another directory "
            f"and start from its weights (lora.init: {run}; without lora, model.path: what `tiercel export {run} "
            f"--merge` writes)\n  {lines}"
        )
    told = [f"the recipe has changed: {line}" for key, line in changed.items() if key != "output"]
    if now.optim.schedule != "constant" and {"train.steps", "train.epochs"} & changed.keys():
        told.append(
            f"optim.schedule: {now.optim.schedule} ends with the run, so from here on the learning rate is that of a "
            "run of the new length"
        )
    if any(map(is_rounded, changed)):
        told.append("from here on, sums are computed in another order; results differ only by rounding")
        if now.lora is not None and now.lora.dropout > 0:
            told.append("lora.dropout: from here on, different masks are drawn")
    return tuple(told)
