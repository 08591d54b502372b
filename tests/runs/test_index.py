"""index.jsonl: what a run writes for each step, and the same made from the files alone."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rewards.samples import scored, scored_group
from tests.web.report.fake_runs import completion, group, write_lines, written_entry
from tiercel.config.schema import Data, GrpoRecipe, Lora, Model, Train
from tiercel.rewards.text import Exact
from tiercel.runs.checkpoints import save_checkpoint
from tiercel.runs.directory import open_run, roll_back_to_checkpoint
from tiercel.runs.index import append_entry, file_entry
from tiercel.runs.json_lines import cut_lines
from tiercel.types import RewardValue


def groups() -> list[dict]:
    """Two groups: one right of three, one masked; in the other all masked."""
    made = [
        completion("a", {"iou": 1.0, "format": 0.5}, True) | {"total": 1.1},
        completion("ü", {"iou": 0.0, "format": None}, False) | {"total": 0.0},
        completion("c", {"iou": 0.5, "format": 0.5}, False) | {"total": 0.6},
        completion("d", {"iou": None, "format": None}, None) | {"total": None},
    ]
    lost = [completion("e", {"iou": None}, None) | {"total": None}]
    return [group("row-1", "é?", 1, [], made), group("row-2", "?", 2, [], lost)]


def test_an_entry_has_the_place_and_the_numbers_of_each_group():
    records = groups()
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    entry = written_entry("rollouts", 3, lines, records)
    size = len(lines[0].encode())
    assert size > len(lines[0])  # letters of two bytes
    assert (entry["folder"], entry["step"], entry["ids"]) == ("rollouts", 3, ["row-1", "row-2"])
    assert (entry["starts"], entry["bytes"]) == ([0, size], [size, len(lines[1].encode())])
    assert (entry["best"], entry["mean"], entry["worst"]) == ([1.1, None], [0.5667, None], [0.0, None])
    assert (entry["judged"], entry["right"], entry["masked"]) == ([3, 0], [1, 0], [1, 1])
    assert entry["rewards"] == {"iou": [0.5, None], "format": [0.5, None]}


def test_a_file_alone_gives_the_same_entry_without_its_bad_lines(tmp_path):
    records = groups()
    file = tmp_path / "rollouts" / "step-000003.jsonl"
    write_lines(file, records)
    lines = file.read_text().splitlines(keepends=True)
    assert file_entry(tmp_path, "rollouts", 3) == written_entry("rollouts", 3, lines, records)
    file.write_text(f'{lines[0]}{{"id": "cut off\n[1]\n{{"id": 3}}\n{lines[1]}', encoding="utf-8")
    entry = file_entry(tmp_path, "rollouts", 3)
    assert entry["ids"] == ["row-1", "row-2"]
    start = entry["starts"][1]
    assert file.read_bytes()[start : start + entry["bytes"][1]] == lines[1].encode()


def test_later_steps_and_a_cut_line_are_removed(tmp_path: Path):
    cut_lines(tmp_path / "index.jsonl", 3)  # a run without an index
    assert list(tmp_path.iterdir()) == []
    for step in (1, 2, 3):
        append_entry(tmp_path, written_entry("rollouts", step, [], []))
    before = (tmp_path / "index.jsonl").read_text().splitlines(keepends=True)
    with (tmp_path / "index.jsonl").open("a") as file:
        file.write('{"folder": "rol')
    cut_lines(tmp_path / "index.jsonl", 2)
    assert (tmp_path / "index.jsonl").read_text() == "".join(before[:2])


def test_a_run_that_is_cut_and_goes_on_has_the_same_index(tmp_path):
    recipe = GrpoRecipe(
        model=Model(path="m"), lora=Lora(rank=8), data=Data(train="r"), rewards=(Exact(),), train=Train(steps=9),
        output=str(tmp_path / "run"),
    )  # fmt: skip
    family = SimpleNamespace(coordinate_space=None)

    def record(run, step: int) -> None:
        group = scored_group(scored(step / 7, True, iou=RewardValue(value=step / 7)), scored(0.0, False))
        with run.recording("rollouts", step, family) as record_groups:
            record_groups([group], [[0.5, -0.5]])

    with open_run(recipe) as run:
        for step in (1, 2, 3):
            record(run, step)
            if step < 3:
                save_checkpoint(run.checkpoints, step, lambda directory: None, {})
        whole = (run.path / "index.jsonl").read_bytes()
        assert whole.count(b"\n") == 3
        assert json.loads(whole.splitlines()[0]) == file_entry(run.path, "rollouts", 1)
    with open_run(recipe) as run:
        assert roll_back_to_checkpoint(run) is not None
        assert (run.path / "index.jsonl").read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])
        record(run, 3)
        assert (run.path / "index.jsonl").read_bytes() == whole


def test_a_file_that_is_written_part_by_part_equals_one_that_is_written_at_once(tmp_path):
    recipe = GrpoRecipe(
        model=Model(path="m"), lora=Lora(rank=8), data=Data(train="r"), rewards=(Exact(),), train=Train(steps=9),
        output=str(tmp_path / "run"),
    )  # fmt: skip
    family, value = SimpleNamespace(coordinate_space=None), RewardValue(value=0.25)
    every = [scored_group(each) for each in (scored(1.0, True, iou=value), scored(0.5), scored(0.0, exact=value))]
    with open_run(recipe) as run:
        with run.recording("evaluations", 1, family) as record:
            record(every, [[None]] * 3)
        with run.recording("evaluations", 2, family) as record:
            for part in (every[:2], every[2:], []):
                assert len(record(part, [[None]] * len(part))) == len(part)
            assert not (run.path / "evaluations" / "step-000002.jsonl").exists()
        whole, parts = map(json.loads, (run.path / "index.jsonl").read_text().splitlines())
        assert {**parts, "step": 1} == whole == file_entry(run.path, "evaluations", 1)
        assert whole["rewards"] == {"iou": [0.25, None, None], "exact": [None, None, 0.25]}
        one, other = ((run.path / "evaluations" / f"step-00000{step}.jsonl").read_bytes() for step in (1, 2))
        assert one == other
        with pytest.raises(ZeroDivisionError), run.recording("evaluations", 3, family) as record:
            record(every, [[None]] * 3)
            raise ZeroDivisionError
        assert len(list((run.path / "evaluations").iterdir())) == 2
