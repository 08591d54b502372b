"""A run directory: its files, the lock that one process holds, and how a run resumes from it."""

import fcntl
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiercel.config import Recipe, flatten
from tiercel.config.schema import Reliability
from tiercel.config.yaml_text import render
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.distributed.versions import installed_versions
from tiercel.errors import RunError
from tiercel.models.family import Family
from tiercel.models.images import picture_image
from tiercel.reliability.pulse import PULSES
from tiercel.reliability.redaction import redact_values
from tiercel.runs.checkpoints import FoundCheckpoint, newest_valid
from tiercel.runs.ending import LOCK, told_ending
from tiercel.runs.files import json_line, write_atomically
from tiercel.runs.group_records import Folder, groups_path
from tiercel.runs.index import append_entry, cut_index, written_entry
from tiercel.runs.recipe import load_run_recipe
from tiercel.runs.recording import gathered_groups, group_record, images_of
from tiercel.runs.token_records import GroupTokens, tokens_path
from tiercel.types import EncodedImage, ScoredGroup
from tiercel.writing import GO_ON, writing

_MAY_DIFFER_IN = {
    "train": ("steps", "epochs", "save_every", "eval_every", "log_every", "keep", "keep_best"),
    "train.profile": ("steps",),
    "rollout": ("urls", "request_timeout", "patience", "parity_action", "record_tokens"),
    "rollout.vllm": ("gpu_memory_utilization", "sleep_level"),
    "reliability": tuple(Reliability.model_fields),
}
MAY_DIFFER = (
    *(f"{section}.{key}" for section, keys in _MAY_DIFFER_IN.items() for key in keys),
    *("train.strategy", "train.shard_size", "train.context_parallel", "train.profile"),
    *("teacher.url", "algorithm.teacher.url"),
    *("trackers", "output"),
)
LOCK_PATIENCE_SECONDS = 5.0
FOLDERS = ("rollouts", "evaluations", "tokens", "images", "checkpoints")
# Files that a run may leave where it ends before it has written config.yaml.
BEGUN, SIGNS = (".lock", "config.yaml.tmp", "stall", "log.txt"), ".signs-"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run that is open for writing. All ranks call its methods. The first rank writes the files; each rank writes its
    own pictures."""

    path: Path
    ranks: Ranks = ALONE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def bad_rows_file(self) -> Path:
        return self.path / "bad_rows.jsonl"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def record(self, row: Mapping[str, Any]) -> None:
        """Append one row to metrics.jsonl and flush it."""

        def append() -> None:
            with writing(self.metrics_file, GO_ON), self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json_line(row))

        self.ranks.on_first(append)

    def rollouts_file(self, step: int) -> Path:
        """Return the file of the groups that the step's last update learnt from."""
        return groups_path(self.path, "rollouts", step)

    def record_groups(
        self,
        folder: Folder,
        step: int,
        family: Family,
        scored: Sequence[ScoredGroup],
        advantages: Sequence[Sequence[float | None]],
    ) -> list[ScoredGroup]:
        """Write a step's file of rollouts/ or evaluations/, and each image once. Returns the groups of all ranks to the
        first rank, in the global order and without pixels; an empty list to the others."""
        for group in scored:
            self.ranks.pulse.beat()
            for image in images_of(group.group):
                self.save_image(image)
        everyone = gathered_groups(self.ranks, scored, advantages)
        space = family.coordinate_space
        records = [group_record(group, values, space).as_json() for group, values in everyone]
        lines = [json_line(record) for record in records]
        file = groups_path(self.path, folder, step)

        def write() -> None:
            with writing(file, GO_ON):
                write_atomically(file, "".join(lines))
                append_entry(self.path, written_entry(folder, step, lines, records))

        self.ranks.on_first(write)
        return [group for group, _ in everyone]

    def record_tokens(self, step: int, groups: Sequence[GroupTokens]) -> None:
        """Write a step's file of tokens/. `groups`: of the first rank; none writes no file."""
        file = tokens_path(self.path, step)

        def write() -> None:
            if groups:
                with writing(file, GO_ON):
                    write_atomically(file, "".join(json_line(group.as_json()) for group in groups))

        self.ranks.on_first(write)

    def save_image(self, image: EncodedImage) -> None:
        """Save the picture that the model got, under its hash."""
        path = self.path / "images" / f"{image.sha256}.png"
        if not path.exists():
            temporary = path.with_suffix(f".{self.ranks.rank}.tmp")
            with writing(path, GO_ON):
                picture_image(image.views[0]).save(temporary, format="PNG")
                temporary.replace(path)


@contextmanager
def open_run(recipe: Recipe, ranks: Ranks = ALONE) -> Iterator[RunDirectory]:
    """Make or reopen the recipe's run directory, and lock it on the first rank. Raises RunError where the directory
    holds something else or another recipe's run, or where a rank cannot see it."""
    path = Path(recipe.output)
    with ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(_held(recipe, path)))
        ranks.together(lambda: _require_seen(path))
        with ranks.pulse.shown_in(path / PULSES / f"rank-{ranks.rank}.json"):
            yield RunDirectory(path=path, ranks=ranks)


def _require_seen(path: Path) -> None:
    if not (path / "config.yaml").is_file():
        remedy = "name a directory that all ranks share"
        raise RunError(f"output: {path.absolute()} is not there on {platform.node()}; {remedy}")


@contextmanager
def _held(recipe: Recipe, path: Path) -> Iterator[None]:
    with writing(path, "name another `output`, or free some space there and allow writing"):
        lock = _opened(path)
    try:
        _take(lock, path)
        config = path / "config.yaml"
        if config.exists():
            _require_same(load_run_recipe(path), recipe, config)
        with writing(path, GO_ON):
            _begin(recipe, path)
            os.utime(lock)  # when the last process began
        with told_ending(path):
            yield
    finally:
        os.close(lock)


def _opened(path: Path) -> int:
    """Return the descriptor of the lock file of a directory that is a run or is to become one."""
    config = path / "config.yaml"
    if path.exists() and not path.is_dir():
        raise RunError(f"output: {path} is a file; name a directory")
    is_other = path.is_dir() and not config.exists()
    if is_other and not all(entry.name in BEGUN or entry.name.startswith(SIGNS) for entry in path.iterdir()):
        raise RunError(f"output: {path} is not empty and has no config.yaml, so it is no run; name another directory")
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path / LOCK, os.O_RDWR | os.O_CREAT)


def _begin(recipe: Recipe, path: Path) -> None:
    text = f"# tiercel {recipe.kind}\n" + render(redact_values(recipe.model_dump(mode="json")))
    write_atomically(path / "config.yaml", text)
    for name in FOLDERS:
        (path / name).mkdir(exist_ok=True)
    shutil.rmtree(path / PULSES, ignore_errors=True)  # of ranks that were killed
    if not any((path / "checkpoints").iterdir()):  # a run that begins anew
        (path / "bad_rows.jsonl").unlink(missing_ok=True)
    write_atomically(path / "env.json", json.dumps(redact_values(environment()), indent=1, sort_keys=True))


def _take(lock: int, path: Path) -> None:
    """Lock the run. The workers of a run that was just killed hold the lock until they end, so this waits a little."""
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                reason = f"output: another process is writing {path}; wait for it or name another directory"
                raise RunError(reason) from error
            time.sleep(0.1)


def resume_point(
    run: RunDirectory,
    report: Callable[[str], None],
    require_usable: Callable[[FoundCheckpoint], None] = lambda found: None,
) -> FoundCheckpoint | None:
    """Find the newest valid checkpoint and remove the metrics, rollouts, evaluations and index lines of later steps.
    Nothing is removed where `require_usable` raises."""
    found = newest_valid(run.checkpoints, report)
    if found is not None:
        require_usable(found)
    step = found.step if found else -1
    with writing(run.path, GO_ON):
        if run.metrics_file.exists():
            kept = [row for row in read_metrics(run.path) if row["step"] <= step]
            write_atomically(run.metrics_file, "".join(json_line(row) for row in kept))
        for folder in ("rollouts", "evaluations", "tokens"):
            for file in (run.path / folder).glob("step-*.jsonl"):
                if int(file.stem.removeprefix("step-")) > step:
                    file.unlink()
        cut_index(run.path, step)
    return found


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of metrics.jsonl. A last line that a crash cut short is left out. Raises RunError for any other
    line that is not JSON."""
    rows = []
    file = path / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RunError(f"{file}:{number} is not JSON: {error}; correct or remove the line") from error
    return rows


def environment() -> dict[str, Any]:
    """Describe versions and devices, for env.json; no environment variables."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": installed_versions(),
        "cpu_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _require_same(before: Recipe, now: Recipe, config: Path) -> None:
    was = before.kind
    if was != now.kind:
        raise RunError(f"output: {config.parent} is a run of `tiercel {was}`; name another directory")
    old, new = redact_values(flatten(before)), redact_values(flatten(now))  # config.yaml was written without secrets
    different = [
        f"{key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in MAY_DIFFER
    ]
    if different:
        lines = "\n  ".join(different)
        raise RunError(
            f"output: {config.parent} was made with another recipe; go on with the old values or name another "
            f"directory\n  {lines}"
        )
