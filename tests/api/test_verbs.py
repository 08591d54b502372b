"""Whole runs from Python: the same run as the command's, followed, stopped and resumed."""

import base64
import io
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiercel as tc
from tests.api.right_answers import right
from tests.forked import commands
from tests.training.test_offline import bytes_of, without_times
from tiercel.api.given import MOST_FOLDERS, is_rows, write_rows
from tiercel.api.recipe import Recipe
from tiercel.api.running import _handed_on
from tiercel.cli.main import main
from tiercel.config.data import Data
from tiercel.config.schema import Model, SftRecipe, Train
from tiercel.data.media.images import decode
from tiercel.data.reading import read_rows
from tiercel.errors import DataError, ModelError, RecipeError, RunError
from tiercel.log import printed
from tiercel.runs.ending import ending_of
from tiercel.training import session
from tiercel.training.finished_step import FinishedStep, StepControl

KEYS = {
    "lora": {"rank": 4, "alpha": 8},
    "learner": {"max_tokens_per_microbatch": 250},
    "rollout": {"group_size": 3, "max_new_tokens": 6},
    "optim": {"lr": 1e-2, "prompts_per_step": 2},
    "train": {"save_every": 1, "threads": 1},
}


@pytest.fixture
def rows() -> list[dict]:
    """Rows in memory, with Pillow images."""
    return [
        {
            "messages": [{"role": "user", "content": f"<image>Which one is it, {number}?"}],
            "images": [Image.new("RGB", (56, 56), (20 * number, 0, 0))],
            "answer": str(number % 2),
        }
        for number in range(8)
    ]


@pytest.fixture
def keys(tiny_checkpoints, rows) -> dict:
    model = {"path": str(tiny_checkpoints["qwen2_5_vl"]), "dtype": "float32"}
    data = {"train": rows, "max_prompt_tokens": 200, "workers": 0}
    return {**KEYS, "model": model, "data": data, "rewards": [right, ("format", 0.1)]}


def test_a_run_that_python_begins_and_the_command_ends_is_the_run_of_either(keys, tmp_path):
    whole = tc.grpo(**keys, steps=3, output=tmp_path / "python")
    assert whole.steps == 3 and [row["step"] for row in whole.metrics] == [1, 2, 3]
    recipe = whole.path / "config.yaml"
    assert main(["grpo", str(recipe), f"output={tmp_path / 'command'}"]) == 0
    begun = tc.grpo(**keys, steps=3, output=tmp_path / "both", on_step=lambda step: step.number == 1 and step.stop())
    assert begun.steps == 1
    assert main(["grpo", str(begun.path / "config.yaml")]) == 0
    assert bytes_of(whole.path) == bytes_of(tmp_path / "command") == bytes_of(begun.path)
    assert without_times(whole.path) == without_times(tmp_path / "command") == without_times(begun.path)


@pytest.mark.parametrize("form", ["paths", "absolute paths", "image_root and Pillow images"])
def test_rows_in_memory_may_name_pictures_anywhere(keys, rows, tmp_path, monkeypatch, form):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    monkeypatch.chdir(tmp_path)
    for number, row in enumerate(rows):
        row["images"][0].save(pictures / f"{number}.png")
        name = f"{number}.png"
        own = {"paths": f"pictures/{name}", "absolute paths": pictures / name}.get(form, name)
        row["images"] = [row["images"][0] if number % 2 and form.startswith("image_root") else own]
    more = {"image_root": "pictures"} if form.startswith("image_root") else {}
    run = tc.grpo(**{**keys, "data": {**keys["data"], **more}}, steps=1, output="runs/a")
    assert run.steps == 1
    assert len(tc.evaluate(run, rows[:3]).groups) == 3
    with pytest.raises(ModelError):
        tc.load(run, adapter=tmp_path / "no adapter")
    with pytest.raises(RecipeError):
        tc.load(run.recipe.model.path, best=True)
    with pytest.raises(RecipeError):
        tc.load(run, adapter=tmp_path / "no adapter", best=True)


def test_rows_may_name_pictures_that_are_links(tmp_path):
    """The hub's cache has links to files that are named by their hash."""
    for folder in ("blobs", "snapshot"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "blobs/0123.png")
    (tmp_path / "snapshot/a.png").symlink_to(tmp_path / "blobs/0123.png")
    asked = {"messages": [{"role": "user", "content": "<image>?"}], "images": [tmp_path / "snapshot/a.png"]}
    written = write_rows([asked], tmp_path / "run")
    assert {str(tmp_path / "blobs"), str(tmp_path / "snapshot")} <= set(written.media_folders)


def test_half_of_a_surrogate_pair_and_a_data_set_without_an_iterator_are_written(tmp_path):
    class Rows:  # as a map-style Dataset of torch
        def __len__(self):
            return 2

        def __getitem__(self, place):
            return {"messages": [{"role": "user", "content": f"{place}\ud83d"}]}

    lines = Path(write_rows(Rows(), tmp_path / "run").file).read_text(encoding="utf-8").splitlines()
    assert is_rows(Rows()) and [json.loads(line)["messages"][0]["content"] for line in lines] == ["0?", "1?"]


def test_a_rate_that_no_step_can_have_is_refused():
    step = FinishedStep(number=1, metrics={}, run=Path("run"), control=StepControl())
    for rate in (-1e-5, float("nan"), float("inf")):
        with pytest.raises(ValueError):
            step.set_lr(rate)
    step.set_lr(0.0)
    step.set_lr(None)


def test_a_picture_that_is_not_there_is_named_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"messages": [{"role": "user", "content": "<image>?"}]}
    Image.new("RGB", (9, 9)).save(tmp_path / "there.png")
    coded = base64.b64encode((tmp_path / "there.png").read_bytes() * 9).decode()  # longer than a name of a file
    rows = [{**asked, "image": "lost.png"}, {**asked, "image": "there.png"}, {**asked, "image": coded}]

    def names(**data: str) -> list[str]:
        written = write_rows(rows, tmp_path / "run", **data)
        assert written.media_folders == (str(tmp_path),)
        return [json.loads(line)["image"] for line in Path(written.file).read_text().splitlines()]

    assert names() == [str(tmp_path / "lost.png"), str(tmp_path / "there.png"), coded]
    assert names(image_root="pictures")[0] == "lost.png"


def test_values_that_json_does_not_have_are_left_out_and_a_missing_number_is_none(tmp_path):
    rows = [
        {"question": "0", "score": math.nan, "answer": "a"},
        {"question": "1", "score": np.array([0.5, math.nan]), "answer": {1, 2}},
        {"question": "2", "score": np.float64(0.5), "answer": "b", "when": date(2026, 1, 2)},
    ]
    said: list[str] = []
    with printed(said.append):
        written = write_rows(rows, tmp_path / "run")
    found = [json.loads(line) for line in Path(written.file).read_text(encoding="utf-8").splitlines()]
    assert [row["score"] for row in found] == [None, [0.5, None], 0.5]
    assert [row["answer"] for row in found] == ["a", None, "b"] and found[2]["when"] is None
    assert len(said) == 2 and "the column answer" in said[0] and "row 2" in said[0] and "the column when" in said[1]


@pytest.mark.parametrize("package", ("pandas", "pyarrow"))
def test_a_table_is_its_rows(tmp_path, package):
    module = pytest.importorskip(package)
    columns = {"question": ["a?", "b?"], "answer": ["a", "b"]}
    table = module.DataFrame(columns) if package == "pandas" else module.table(columns)
    lines = Path(write_rows(table, tmp_path / "run").file).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"question": "a?", "answer": "a"},
        {"question": "b?", "answer": "b"},
    ]


def test_rows_of_a_class_with_columns_are_taken_as_they_come(tmp_path):
    class Mine:
        columns, format = ["question"], None

        def __iter__(self):
            return iter([{"question": "?"}])

    assert json.loads(Path(write_rows(Mine(), tmp_path / "run").file).read_text(encoding="utf-8")) == {"question": "?"}


def test_rows_that_a_transform_makes_are_written_as_it_makes_them(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"question": ["a", "b"]}).with_transform(
        lambda batch: {"question": [f"{text}?" for text in batch["question"]]}
    )
    lines = Path(write_rows(rows, tmp_path / "run").file).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["question"] for line in lines] == ["a?", "b?"]


def test_all_splits_at_once_are_refused():
    class Split:
        features = ()

    with pytest.raises(RecipeError, match=r"data: has several splits \(train, test\)"):
        Recipe({}).changed(data={"train": Split(), "test": Split()})


def test_bytes_of_a_file_and_arrays_are_pictures(tmp_path):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6)).save(buffer, "JPEG")
    jpeg, shown = buffer.getvalue(), [{"type": "image", "image": np.zeros((6, 8, 4), np.uint8)}]
    columns = {"images": [jpeg, np.zeros((6, 8, 3), np.uint8)], "image": np.zeros((6, 8), np.uint8)}
    row = {"messages": [{"role": "user", "content": shown}], **columns, "mask": np.zeros((1, 2), np.uint8)}
    written = write_rows([row], tmp_path / "run")
    (found,) = map(json.loads, Path(written.file).read_text(encoding="utf-8").splitlines())
    names = [*found["images"], found["image"], found["messages"][0]["content"][0]["image"]]
    files = [tmp_path / "run/given" / name for name in names]
    assert [Image.open(file).size for file in files] == [(8, 6)] * 4 and files[0].read_bytes() == columns["images"][0]
    assert found["mask"] == [[0, 0]]
    with pytest.raises(DataError) as problem:
        write_rows([{"image": np.zeros((3, 6, 8), np.uint8)}], tmp_path / "run")
    assert all(named in str(problem.value) for named in ("row 1 ", "3 x 6 x 8"))


def test_pictures_in_parts_of_turns_become_files_and_paths_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9)).save(tmp_path / "there.png")
    parts = [{"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "image", "url": "there.png"}]
    parts += [{"type": "image_url", "image_url": {"url": "there.png"}}, {"type": "text", "text": "there.png"}]
    written = write_rows([{"messages": [{"role": "user", "content": parts}]}], tmp_path / "run")
    (row,) = map(json.loads, Path(written.file).read_text(encoding="utf-8").splitlines())
    made, named, openai, text = row["messages"][0]["content"]
    assert not os.path.isabs(made["image"]) and Image.open(tmp_path / "run/given" / made["image"]).size == (8, 8)
    assert named["url"] == openai["image_url"]["url"] == str(tmp_path / "there.png")
    assert text == parts[3]
    assert str(tmp_path) in written.media_folders


def test_many_folders_of_pictures_are_admitted_by_the_one_around_them(tmp_path):
    rows = []
    for number in range(MOST_FOLDERS + 1):
        file = tmp_path / "sets" / str(number) / "a.png"
        file.parent.mkdir(parents=True)
        file.touch()
        rows.append({"image": str(file)})
    assert write_rows(rows[:2], tmp_path / "run").media_folders == tuple(str(tmp_path / "sets" / n) for n in "01")
    assert write_rows(rows, tmp_path / "run").media_folders == (str(tmp_path / "sets"),)
    assert write_rows(rows[:1], tmp_path / "run").admitted(["/data"]) == ["/data", str(tmp_path / "sets" / "0")]


def test_steps_are_followed_and_steered(keys, tmp_path):
    seen = []
    for step in tc.grpo(**keys, steps=9, output=tmp_path / "run", iterate=True):
        seen.append((step.number, step.metrics["lr"]))
        assert len(step.rollouts) == 2 and len(step.rewards[0]) == 3
        total = sum(value for values in step.advantages for value in values)
        assert total == pytest.approx(0, abs=1e-4)
        step.set_lr(1e-4)
        if step.number == 2:
            step.stop()
    assert seen == [(1, 1e-2), (2, 1e-4)]
    run = tc.Run(tmp_path / "run")
    assert run.resume(steps=3).steps == 3
    assert run.rollouts() == run.rollouts(3) and len(run.rollouts(2)[0].completions) == 3 and run.rollouts(7) == ()


def test_a_step_that_is_due_is_saved_before_it_is_handed_out_and_a_stopped_run_has_its_report(keys, tmp_path):
    saved = {}

    def look(step: FinishedStep) -> None:
        saved[step.number] = (step.run / f"checkpoints/step-{step.number:06d}").is_dir()
        if step.number == 3:
            step.stop()

    run = tc.grpo(**keys | {"train": {"save_every": 2, "threads": 1}}, steps=9, output=tmp_path / "run", on_step=look)
    assert saved == {1: False, 2: True, 3: False}
    assert (run.path / "checkpoints/step-000003").is_dir() and (run.path / "report.html").is_file()


@pytest.mark.parametrize("save_every", (2, 100))
@pytest.mark.parametrize("way", ("break", "error", "error while a variable holds the steps"))
def test_a_loop_that_is_left_saves_its_newest_step(keys, tmp_path, way, save_every):
    keys = {**keys, "train": {"save_every": save_every, "threads": 1}}
    held = []

    def steps() -> Iterator[FinishedStep]:
        found = tc.grpo(**keys, steps=9, output=tmp_path / "run", iterate=True)
        held.extend([found] * way.endswith("steps"))
        return found

    with pytest.raises(KeyError) if way != "break" else nullcontext():
        for step in steps():
            if step.number == 2:
                if way == "break":
                    break
                raise KeyError("mine")
    for left in held:
        left.close()  # as atexit does
    assert (tmp_path / "run/checkpoints/step-000002").is_dir()
    assert ending_of(tmp_path / "run").state == "stopped"
    assert [step.number for step in tc.grpo(**keys, steps=3, output=tmp_path / "run", iterate=True)] == [3]


class Live:
    """A reward that lives in this process."""

    def __init__(self) -> None:
        self.calls = 0

    def score(self, completion: str) -> float:
        self.calls += 1
        return float(len(completion) % 3)


def test_a_method_of_an_object_scores_in_this_process(keys, tmp_path, capsys):
    live = Live()
    run = tc.grpo(**{**keys, "rewards": live.score}, steps=2, output=tmp_path / "run")
    assert live.calls == 2 * 2 * 3 and "reward/score/mean" in run.metrics[-1]
    refused = commands().run(["grpo", str(run.path / "config.yaml"), "train.steps=3"], timeout=120)
    assert refused.returncode == 2 and "score was a function of a Python session" in refused.stderr


def test_several_functions_are_rewards_each_of_its_own_run(keys, tmp_path):
    def in_order(*numbers):
        return [lambda completion, number=number: number for number in numbers]

    first = tc.grpo(**{**keys, "rewards": in_order(1.0, 0.5)}, steps=1, output=tmp_path / "first")
    tc.grpo(**{**keys, "rewards": in_order(7.0, 9.0)}, steps=1, output=tmp_path / "second")
    first.resume(steps=2)
    for row in first.metrics:
        assert [value for name, value in row.items() if re.fullmatch(r"reward/function\w*/mean", name)] == [1.0, 0.5]
    with pytest.raises(RecipeError):
        tc.grpo(**{**keys, "rewards": [first.resume] * 2}, steps=1, output=tmp_path / "twice")


def test_a_copied_run_is_resumed_where_it_is(keys, tmp_path):
    run = tc.grpo(**keys, steps=1, output=tmp_path / "run")
    copied = tc.Run(shutil.copytree(run.path, tmp_path / "copied"))
    assert copied.resume(steps=2).metrics[-1]["step"] == 2 and run.metrics[-1]["step"] == 1


def test_a_moved_run_is_resumed_with_its_rows_pictures_and_functions(keys, tmp_path):
    data = {**keys["data"], "eval": keys["data"]["train"][:2]}
    score = {"rewards": lambda completion: len(completion)}
    run = tc.grpo(**{**keys, "data": data, **score}, steps=1, output=tmp_path / "run")
    moved = tc.Run(shutil.move(run.path, tmp_path / "moved"))
    assert moved.resume(steps=2).metrics[-1]["step"] == 2
    assert len(tc.evaluate(moved).groups) == 2 and not run.path.exists()


def test_pillow_images_are_upright_and_in_modes_of_png(tmp_path):
    turned, exif = Image.new("RGB", (8, 6), "red"), Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    pictures = [Image.open(tmp_path / "turned.jpg"), Image.new("CMYK", (8, 6)), Image.new("I;16", (8, 6))]
    written = write_rows([{"images": pictures}], tmp_path / "run")
    (found,) = map(json.loads, Path(written.file).read_text(encoding="utf-8").splitlines())
    headers = [(tmp_path / "run/given" / image).read_bytes()[16:26] for image in found["images"]]
    rgb, grey = 2, 0  # PNG's IHDR: width, height, bits, colour; Pillow before 11.3 opens 16 bits as mode I
    assert [struct.unpack(">IIBB", header) for header in headers] == [(6, 8, 8, rgb), (8, 6, 8, rgb), (8, 6, 16, grey)]
    Image.effect_noise((64, 64), 50).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-900])
    with pytest.raises(DataError, match=r"row 1 .*a picture cannot be read"):
        write_rows([{"images": [Image.open(tmp_path / "cut.png")]}], tmp_path / "run")


def test_models_and_scores(keys, rows, tmp_path):
    run = tc.grpo(**keys, eval=rows[:2], steps=1, output=tmp_path / "run")
    assert {"eval/reward/mean"} <= run.metrics[-1].keys()
    model = tc.load(run)
    one = model.generate("Which?", images=[Image.new("RGB", (56, 56))], max_new_tokens=4)
    rows[0]["images"][0].save(tmp_path / "a.png")
    other = tc.load(run.path).generate(
        [{"role": "user", "content": "Which <image>?"}], images=[tmp_path / "a.png"], max_new_tokens=4
    )
    assert isinstance(one.text, str) and isinstance(other.text, str)
    several = model.generate("Which?", temperature=1.0, count=3, max_new_tokens=4, seed=1)
    assert len(several.texts) == 3
    assert several.texts == model.generate("Which?", temperature=1.0, count=3, max_new_tokens=4, seed=1).texts
    with pytest.raises(DataError):
        model.generate("Which?", count=3)
    scored = tc.evaluate(run)
    assert scored.score == pytest.approx(run.metrics[-1]["eval/reward/mean"]) and len(scored.groups) == 2
    assert len(tc.evaluate(run, rows[:3]).groups) == 3
    exported = run.export(tmp_path / "merged")
    assert (exported / "config.json").is_file()
    assert "<iframe" in run._repr_html_() and str(run.path) in repr(run)


def test_the_other_methods(keys, rows, tmp_path):
    del keys["rewards"], keys["rollout"]
    keys["learner"] = {"max_tokens_per_microbatch": 400}
    answered = [
        {
            **row,
            "messages": [*row["messages"], {"role": "assistant", "content": "yes"}],
            "rejected": "no",
            "label": True,
        }
        for row in rows
    ]
    for name, changes in (("sft", {}), ("dpo", {"dpo": {"loss": "sigmoid"}}), ("reward", {"ranking": {}})):
        data = {**keys["data"], "train": answered, "format": "tiercel"}
        run = getattr(tc, name)(**{**keys, "data": data, **changes}, steps=1, output=tmp_path / name)
        assert run.recipe.kind == name and run.metrics[-1]["step"] == 1
    assert tc.Run(tmp_path / "sft").rollouts() == ()


def test_all_problems_are_told_before_anything_is_written(tmp_path):
    with pytest.raises(RecipeError) as error:
        tc.grpo(model="m", data=[{"a": 1}], rewards=["no_such"], steps=0, output=tmp_path / "run", lora={"ranks": 3})
    text = "\n".join(error.value.problems)
    assert "train.steps" in text and "lora.ranks" in text and "no_such" in text
    assert not (tmp_path / "run").exists()
    assert error.value._render_traceback_() == [f"RecipeError: {error.value}"]


def test_what_json_cannot_hold_is_one_problem_among_the_others(tmp_path):
    rows = [{"images": [Image.new("RGB", (4, 4))]}]
    with pytest.raises(RecipeError) as error:
        tc.grpo(model="m", train_dataset=rows, rewards="exact", seed=object(), max_steps=np.int64(2), output="runs/x")
    keys = {line.partition(":")[0] for line in error.value.problems}
    assert keys == {"train_dataset", "train.seed", "max_steps", "model.path"}


def test_somebody_elses_folder_stays_as_it_is(keys, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunError):
        tc.grpo(**keys, steps=1, output=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_recipe_goes_through_a_file(keys, tmp_path):
    data = {**keys["data"], "train": "rows.jsonl"}
    recipe = tc.Recipe().changed(**{**keys, "data": data, "rewards": [{"name": "exact"}]}, steps=2, output="runs/x")
    recipe.to_file(tmp_path / "recipe.yaml")
    assert tc.Recipe.from_file(tmp_path / "recipe.yaml") == recipe
    assert recipe.changed(steps=5, lora={"rank": 8}).tree["lora"] == {"rank": 8, "alpha": 8}
    with pytest.raises(RecipeError, match=r"data\.train"):
        recipe.changed(data=[{"a": 1}]).to_file(tmp_path / "other.yaml")


def test_a_data_set_is_written_as_arrow_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    turns, pictures = (
        [{"role": "user", "content": "?"}],
        [Image.new("RGB", (4, 3), colour) for colour in ("red", "blue")],
    )
    rows = [{"id": f"r{number}", "messages": turns, "images": [pictures[number % 2]]} for number in range(4)]
    table = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image())).select([2, 1])
    first, again = (write_rows(table, tmp_path / "run") for _ in range(2))
    assert first == again and [file.name for file in (tmp_path / "run/given").iterdir()] == [Path(first.file).name]
    read = read_rows(first.file, Data(train="-"), "grpo").rows
    assert [row.id for row in read] == ["r2", "r1"]
    assert decode(read[0].images[0], read[0].image_roots, 100).getpixel((0, 0)) == (255, 0, 0)
    assert write_rows(table.select([0]), tmp_path / "run").file != first.file


def test_class_labels_beside_paths_of_pictures_are_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"image": datasets.Value("string"), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    table = datasets.Dataset.from_dict({"image": ["a.png", "b.png"], "kind": [1, -1]}, features=kinds)
    lines = Path(write_rows(table, tmp_path / "run").file).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["dog", None]


@pytest.mark.parametrize(
    ("parts", "is_table"),
    [
        ([{"type": "image", "image": "a.png", "text": None}, {"type": "text", "image": None, "text": "?"}], False),
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], False),
        ([{"type": "image", "image": {"bytes": b"x", "path": "a.png"}}, {"type": "text", "text": "?"}], True),
        ([{"type": "text", "text": "?"}], True),
    ],
)
def test_a_data_set_whose_parts_name_files_is_written_as_lines(tmp_path, monkeypatch, parts, is_table):
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 3)).save("a.png")
    table = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": parts}]}])
    written = write_rows(table, tmp_path / "run")
    assert Path(written.file).is_dir() == is_table
    assert written.media_folders == (() if is_table else (str(tmp_path),))


def test_a_list_of_paths_is_no_list_of_rows():
    assert [is_rows(each) for each in (["a.jsonl", Path("b.jsonl")], [{"a": 1}], [])] == [False, True, True]


def test_equal_rows_are_one_file_and_others_another(keys, rows, tmp_path):
    datasets = pytest.importorskip("datasets")
    first = tc.grpo(**keys, steps=1, output=tmp_path / "run")
    table = datasets.Dataset.from_list([{**row, "images": row["images"]} for row in rows])
    again = tc.grpo(**{**keys, "data": {**keys["data"], "train": table}}, steps=1, output=tmp_path / "table")
    tables = [read_rows(run.recipe.data.train, run.recipe.data, "grpo").rows for run in (first, again)]
    assert [row.messages for row in tables[0]] == [row.messages for row in tables[1]]
    assert tc.grpo(**keys, steps=1, output=tmp_path / "run").steps == 1  # the same run
    rows[0]["answer"] = "another"
    with pytest.raises(RunError, match=r"data\.train"):
        tc.grpo(**keys, steps=1, output=tmp_path / "run")


def test_a_signal_for_a_script_reaches_the_ranks_that_it_started():
    before = signal.getsignal(signal.SIGTERM)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as ranks, _handed_on(ranks):
        os.kill(os.getpid(), signal.SIGTERM)
        assert ranks.wait(60) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_without_threads_gets_those_that_the_process_had(monkeypatch):
    monkeypatch.setattr(session, "_OWN_THREADS", {})
    recipe = SftRecipe(model=Model(path="m"), data=Data(train="-"), train=Train(steps=1, threads=2), output="-")
    before = torch.get_num_threads()
    try:
        session.set_up_numerics(recipe)
        assert torch.get_num_threads() == 2
        session.set_up_numerics(recipe.with_values({"train.threads": None}))
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_ctrl_c_at_a_prompt_keeps_the_run(keys, tmp_path):
    data = {**keys["data"], "train": str(tmp_path / "rows.jsonl")}
    rows = [{"messages": [{"role": "user", "content": f"Which {number}?"}], "answer": "1"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    tc.Recipe().changed(**{**keys, "data": data, "rewards": ["format"]}).to_file(recipe)
    said, output = tmp_path / "said", tmp_path / "run"
    with said.open("wb") as out, (tmp_path / "errors").open("wb") as err:
        process = commands().start([str(recipe), str(output)], out, err, module="tests.api.prompt_cell")
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code, words = process.wait(120), said.read_text().split()
    assert code == 0, (tmp_path / "errors").read_text()
    done = int(words[1])
    assert 0 < done < 1000 and words[3] == str(done + 1)
