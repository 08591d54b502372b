"""Only tiercel's own files are removed or overwritten: what somebody has put into a run, or what leads elsewhere, stays
as it was.

A run resumes (it is cut to its checkpoint, writes, saves, prunes, publishes, reports), or a start without a step starts
over, with somebody's file, folder or link in each place. And `output` names folders that belong to somebody.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tests.runs.test_directory import grpo_recipe
from tiercel.config.schema import Optim
from tiercel.errors import TiercelError
from tiercel.regular_files import FOLDERS
from tiercel.runs.checkpoints import prune, save_checkpoint
from tiercel.runs.directory import RunDirectory, open_run, roll_back_to_checkpoint
from tiercel.runs.files import write_atomically
from tiercel.runs.index import append_entry
from tiercel.runs.publishing import WEIGHTS, Publisher
from tiercel.runs.records import groups_path
from tiercel.training.grpo.journal import keep_in_journal
from tiercel.web.report.page import write_report

SHORT_STRIDE = 23
PLACES = (".", *sorted(FOLDERS), "checkpoints/step-000001", "checkpoints/.step-000009.tmp.mine", "journal/step-000001")
NAMES = ("thesis.txt", "step-000001 (copy)", "step-1", "step-000009.jsonl~", ".step-000001.tmp.mine", "policy-of-mine")
KINDS = ("a file", "a folder", "a link to a file", "a link to a folder", "a link to nothing")
OURS = (
    *("metrics.jsonl", "index.jsonl", "bad_rows.jsonl", "log.txt", "report.html", "end.json"),
    *(
        "config.yaml",
        "env.json",
        "config.yaml.tmp",
        "env.json.tmp",
        "end.json.tmp",
        "report.html.tmp",
        "metrics.jsonl.tmp",
        ".lock",
    ),
    *("checkpoints/step-000001", "checkpoints/step-000002", "checkpoints/step-000003", "checkpoints/.step-000003.tmp"),
    *("checkpoints/step-000001/state.json", "checkpoints/step-000001/deep", "rollouts/step-000003.jsonl"),
    *("rollouts/step-000009.jsonl", "rollouts/step-000003.jsonl.tmp", "journal/rank-0.tmp", "journal/step-000001"),
    *(*sorted(FOLDERS), "journal/step-000003", "pulse/writer.json", "pulse/rank-0.json"),
)
LIVES = ("goes on", "begins anew")
SOMEBODYS: dict[str, dict[str, str]] = {
    "a thesis": {"thesis.tex": "1"},
    "a repository": {".git/HEAD": "ref", "README.md": "1"},
    "a recipe by the name of ours": {"config.yaml": "model: {path: m}\n"},
    "a run's config and nothing else": {"config.yaml": "# tiercel grpo\n", "rows.jsonl": "{}"},
    "a config of somebody, and a lock": {"config.yaml": "model: {path: m}\n", ".lock": ""},
    "a lock": {".lock": "", "data.bin": "1"},
    "env.json of somebody": {"env.json": "{}"},
    "checkpoints of another program": {"checkpoints/step-000001/model.safetensors": "1"},
    "rollouts and metrics": {"metrics.jsonl": '{"step": 1}\n', "rollouts/step-000001.jsonl": "{}\n"},
    "a hidden file": {".bashrc": "1"},
    "a temporary folder of ours by name": {".step-000001.tmp/thesis.tex": "1"},
    "a log and a thesis": {"log.txt": "1", "thesis.tex": "1"},
}
Tree = dict[str, str]


def others_files(size: Size, seed: int, work: Path) -> Figure:
    """Run all cases, or every SHORT_STRIDE-th in a short run. `seed` shifts the choice."""
    started = time.perf_counter()
    kept = {"goes on": _made(work / "going", 3), "begins anew": _made(work / "begun", 0)}
    cases = [(life, place, name, kind) for life in LIVES for place in PLACES for name in NAMES for kind in KINDS]
    cases += [(life, ".", name, kind) for life in LIVES for name in OURS for kind in KINDS if "link" in kind]
    outcomes: list[Outcome] = []
    for number, case in enumerate(cases if size == "full" else cases[seed % SHORT_STRIDE :: SHORT_STRIDE]):
        folder = work / str(number)
        outcomes.append((", ".join(case), _problem(folder, kept[case[0]], *case)))
        shutil.rmtree(folder)
    outcomes += [(f"output is {name}", _taken(work / "output", tree)) for name, tree in SOMEBODYS.items()]
    return figure_of(
        "what is somebody's in a run",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"places": len(PLACES) + len(OURS), "kinds": len(KINDS), "folders_of_somebody": len(SOMEBODYS)},
    )


def _made(run: Path, steps: int) -> Path:
    """Make a run of `steps` steps whose newest checkpoint is from the step before the last."""
    with open_run(grpo_recipe(run)) as opened:
        for step in range(1, steps + 1):
            _step(opened, step)
            if step < steps:
                save_checkpoint(opened.checkpoints, step, _weights, {})
    return run


def _step(opened: RunDirectory, step: int) -> None:
    opened.record({"step": step, "loss": 0.5})
    write_atomically(groups_path(opened.path, "rollouts", step), "{}\n")
    append_entry(opened.path, {"folder": "rollouts", "step": step})


def _weights(directory: Path) -> None:
    (directory / "deep").mkdir(exist_ok=True)
    for name in ("deep/weights", WEIGHTS):
        (directory / name).write_text("weights")


def _goes_on(run: Path) -> None:
    with open_run(grpo_recipe(run)) as opened:
        roll_back_to_checkpoint(opened)
        _step(opened, 3)
        keep_in_journal(run, 0, 3, [])
        publisher = Publisher(run, run / "policies")
        publisher.keep_only([publisher.publish(3, _weights)])
        publisher.close()
        save_checkpoint(opened.checkpoints, 3, _weights, {})
        prune(opened.checkpoints, 3, keep=1)
    write_report(run)


def _begins_anew(run: Path) -> None:
    with open_run(grpo_recipe(run, optim=Optim(lr=1e-3))) as opened:
        _step(opened, 1)


def _problem(folder: Path, kept: Path, life: str, place: str, name: str, kind: str) -> str | None:
    run, elsewhere = folder / "run", folder / "elsewhere"
    shutil.copytree(kept, run, symlinks=True)
    for file in ("step-000001.jsonl", "step-000009.jsonl", "state.json", "rank-0/thesis.tex"):
        _written(elsewhere / file)
    foreign = run / place / name
    is_ours = name in OURS
    _put(foreign, kind, elsewhere)
    before, there = _tree(elsewhere), _tree(foreign)
    try:
        (_goes_on if life == "goes on" else _begins_anew)(run)
    except TiercelError as error:
        if not is_ours and (life, place) != ("begins anew", "checkpoints/step-000001"):  # which then has a step
            return f"the run did not go on: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if _tree(elsewhere) != before:
        return "what lies elsewhere has changed"
    return None if is_ours or _tree(foreign) == there else "it has changed, or is gone"


def _put(place: Path, kind: str, elsewhere: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    make: dict[str, Callable[[], object]] = {
        "a file": lambda: place.write_text("of somebody"),
        "a folder": lambda: _written(place / "step-000001" / "thesis.tex"),
        "a link to a file": lambda: place.symlink_to(elsewhere / "state.json"),
        "a link to a folder": lambda: place.symlink_to(elsewhere),
        "a link to nothing": lambda: place.symlink_to(elsewhere / "nothing"),
    }
    make[kind]()


def _written(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("of somebody")


def _taken(folder: Path, files: Tree) -> str | None:
    """Return what is wrong after a run was to start in somebody's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        _written(folder / name)
        (folder / name).write_text(text)
    before = _tree(folder)
    try:
        _begins_anew(folder)
    except TiercelError as error:
        is_named = str(folder) in str(error)
        return None if is_named and _tree(folder) == before else f"changed, or not named: {error}"
    return "it was taken for a run"


def _tree(path: Path) -> Tree:
    """Return what is at a place, without following links: for each name its text, or where it leads."""
    return {os.path.relpath(each, path): _content(each) for each in (path, *_below(path))}


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for each in sorted(path.iterdir()):
            yield each
            yield from _below(each)


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"-> {os.readlink(path)}"
    return path.read_text() if path.is_file() else "a folder" if path.is_dir() else "nothing"
