"""What happens to a run when a tracker is missing, fails, is slow, or the run itself ends."""

import re
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import ClassVar

import pytest

from tests.trackers.runs import grounding, recipe_of, track
from tiercel.config import tracker_packages
from tiercel.config.tracker_packages import require_packages
from tiercel.errors import EXIT_TERMINATED, ElsewhereError, EnvironmentProblem, Terminated, TrainingError
from tiercel.runs.step_files import pack_step
from tiercel.trackers import opening
from tiercel.trackers.opening import TRACKERS, open_trackers

DOCUMENT = Path(__file__).parents[2] / "docs/trackers.md"


class Recorder:
    """Keeps what it is given, and raises an error or sleeps if it is told to."""

    needs_earlier = False
    made: ClassVar[list["Recorder"]] = []

    def __init__(self, place):
        self.place = place
        self.calls: list[tuple] = []
        self.made.append(self)

    def row(self, step, metrics, pictures):
        self.calls.append(("row", step))
        self.metrics = metrics
        if pictures:
            self.calls.append(("images", step))
            self.captions = [picture.caption for picture in pictures]

    def close(self, ending):
        self.calls.append(("close", ending))


@pytest.fixture
def recorder(monkeypatch):
    """A class in TensorBoard's stead; `recorder.made` has its objects."""

    class Fresh(Recorder):
        made: ClassVar[list[Recorder]] = []

    monkeypatch.setitem(TRACKERS, "tensorboard", Fresh)
    return Fresh


def test_rows_go_to_all_and_are_numbers_only(tmp_path, recorder):
    run, rows = grounding(tmp_path / "run")
    rows[1] |= {"note": "text", "flag": True, "nothing": None, "list": [1]}
    track(run, ["tensorboard"], rows)
    (made,) = recorder.made
    expected = [("row", 0), ("row", 1), ("row", 2), ("images", 2), ("row", 3), ("row", 4), ("images", 4)]
    assert made.calls == [*expected, ("close", "done")]
    assert made.metrics == {key: value for key, value in rows[4].items() if key != "step"}
    assert {"note", "flag", "nothing", "list"}.isdisjoint(made.metrics)
    assert len(made.captions) == 4


def test_a_recipe_without_evaluations_shows_pictures_when_it_saves(tmp_path, recorder):
    run, rows = grounding(tmp_path / "run")
    bare = [{key: value for key, value in row.items() if not key.startswith("eval/")} for row in rows]
    train, data = {"steps": 4, "save_every": 3}, {"train": "rows.jsonl"}
    track(run, ["tensorboard"], bare, train=train, data=data)
    assert [call[1] for call in recorder.made[0].calls if call[0] == "images"] == [3, 4]


def test_pictures_of_steps_that_were_compressed_are_sent(tmp_path, recorder):
    run, rows = grounding(tmp_path / "run")
    for row in rows[1:]:
        pack_step(run, row["step"])
    assert not list((run / "rollouts").glob("*.jsonl"))
    track(run, ["tensorboard"], rows)
    assert [call[1] for call in recorder.made[0].calls if call[0] == "images"] == [2, 4]


@pytest.mark.parametrize("place", ("__init__", "row", "close"))
def test_a_tracker_that_raises_is_turned_off_with_one_line_and_the_others_go_on(tmp_path, recorder, monkeypatch, place):
    class Broken(Recorder):
        made: ClassVar[list[Recorder]] = []

    def broken(self, *_):
        raise OSError("No space left on device\nsecond line")

    monkeypatch.setattr(Broken, place, broken)
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    run, rows = grounding(tmp_path / "run")
    said = track(run, ["wandb", "tensorboard"], rows)
    assert said == [
        "trackers: wandb is off from here on: OSError: No space left on device; the run continues, and metrics.jsonl "
        "has every row"
    ]
    assert [call for call in recorder.made[0].calls if call[0] == "row"] == [("row", step) for step in range(5)]
    assert recorder.made[0].calls[-1] == ("close", "done")


def test_a_slow_tracker_is_turned_off(tmp_path, recorder, monkeypatch):
    monkeypatch.setattr(opening, "PATIENCE", 0.05)
    monkeypatch.setattr(recorder, "row", lambda self, step, metrics, pictures: time.sleep(0.1))
    run, rows = grounding(tmp_path / "run")
    (line,) = track(run, ["tensorboard"], rows)
    assert re.match(r"trackers: tensorboard is off from here on: a step's row took it \d+ s", line)


BY_CALLER = Terminated("stopped after step 3")
BY_CALLER.is_by_caller = True


@pytest.mark.parametrize(
    ("error", "ending"),
    (
        (BY_CALLER, "done"),
        (KeyboardInterrupt(), "stopped"),
        (Terminated("stopped after step 3"), "stopped"),
        (ElsewhereError(1, EXIT_TERMINATED), "stopped"),
        (SystemExit(1), "failed"),
        (ValueError("my own mistake"), "failed"),
        (TrainingError("the loss is nan"), "failed"),
    ),
)
def test_it_is_closed_however_the_run_ends_and_told_how(tmp_path, recorder, error, ending):
    run, rows = grounding(tmp_path / "run")
    recipe = recipe_of(run, ["tensorboard"])
    with pytest.raises(type(error)), open_trackers(recipe.trackers, recipe, run, (), 4) as trackers:
        trackers.row(rows[0])
        raise error
    assert recorder.made[0].calls == [("row", 0), ("close", ending)]


@pytest.mark.parametrize("fault", ("__init__", "row"))
def test_rows_that_a_tracker_has_missed_are_sent_when_the_run_goes_on(tmp_path, recorder, monkeypatch, fault):
    run, rows = grounding(tmp_path / "run")
    honest = getattr(Recorder, fault)

    def broken(self, *given):
        if fault == "__init__" or given[0] == 2:
            raise ConnectionError("the server is down")
        honest(self, *given)

    monkeypatch.setattr(recorder, fault, broken)
    track(run, ["tensorboard"], rows[:3])
    track(run, ["tensorboard"], rows[3:4], kept=rows[:3])  # the server is still down
    monkeypatch.setattr(recorder, fault, honest)
    track(run, ["tensorboard"], rows[4:], kept=rows[:4])
    track(run, ["tensorboard"], [], kept=rows)
    sent = [[call[1] for call in made.calls if call[0] == "row"] for made in recorder.made]
    assert sent[-2:] == ([[0, 1, 2, 3, 4], []] if fault == "__init__" else [[2, 3, 4], []])


def test_a_run_keeps_its_id_until_it_starts_anew(tmp_path, recorder):
    run, rows = grounding(tmp_path / "my study" / "run")
    track(run, ["tensorboard"], rows)
    track(run, ["tensorboard"], rows[3:], kept=rows[:3])
    track(run, ["tensorboard"], rows)
    first, resumed, anew = (made.place for made in recorder.made)
    assert first.id == resumed.id != anew.id
    assert (first.first_step, resumed.first_step, anew.first_step) == (0, 3, 0)
    assert (first.project, first.name, first.directory) == ("my-study", "run", run / "trackers/tensorboard")


def test_names_without_ascii_stay_apart(tmp_path, recorder):
    for path in ("研究/猫-1", "實驗/犬 2", "study/🐈"):
        run, _ = grounding(tmp_path / path)
        track(run, ["tensorboard"], [])
    first, second, third = (made.place for made in recorder.made)
    assert (first.name, second.name) == ("猫-1", "犬-2") and third.name.startswith("tiercel-")
    assert first.project != second.project and third.project == "study"
    assert all(place.project.isascii() and place.project.startswith("tiercel-") for place in (first, second))


def test_a_picture_that_is_not_there_costs_no_row(tmp_path, recorder):
    run, rows = grounding(tmp_path / "run")
    for picture in (run / "images").iterdir():
        picture.write_bytes(b"")
    said = track(run, ["tensorboard"], rows)
    assert [line.partition(":")[2].split(":")[0] for line in said] == [f" no pictures of step {s}" for s in (2, 4)]
    assert [call[1] for call in recorder.made[0].calls if call[0] == "row"] == [0, 1, 2, 3, 4]


def test_an_absent_package_is_named_with_what_installs_it(monkeypatch):
    absent = ("wandb", "swanlab")
    honest = tracker_packages.find_spec
    # wandb's own folder of offline runs makes an empty package of that name in the directory where the run was started.
    folder = ModuleSpec("wandb", None, is_package=True)
    found = {"wandb": folder, "swanlab": None}
    monkeypatch.setattr(tracker_packages, "find_spec", lambda name: found[name] if name in absent else honest(name))
    with pytest.raises(EnvironmentProblem) as problem:
        require_packages(["wandb", "swanlab"])
    text = "trackers: wandb, swanlab are not installed; run pip install wandb swanlab, or remove them from trackers"
    assert str(problem.value) == text and problem.value.exit_code == 2


def test_the_document_has_every_tracker():
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"`{name}`" for name in TRACKERS]
    assert all(f"pip install {name}" in row[1] for name, row in zip(TRACKERS, rows, strict=True))


def test_trackers_load_neither_torch_nor_their_packages():
    program = (
        "import sys, tiercel.trackers.opening\n"
        "print(*sorted({'torch', 'tensorboard', 'wandb', 'trackio', 'swanlab', 'mlflow'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.split() == []
