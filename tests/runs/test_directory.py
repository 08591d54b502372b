"""Opening, locking, refusing and resuming a run directory."""

import fcntl
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.rewards.samples import scored, scored_group
from tiercel.config.schema import Data, GrpoRecipe, Lora, Model, Optim, Reliability, SftRecipe, Train
from tiercel.errors import RecipeError, RunError
from tiercel.log import printed
from tiercel.rewards.shape import Format
from tiercel.rewards.text import Exact
from tiercel.runs import lock, pictures
from tiercel.runs.checkpoints import directory_of, save_checkpoint
from tiercel.runs.directory import ANEW, RunDirectory, open_run, read_metrics, roll_back_to_checkpoint
from tiercel.runs.identity import MAY_DIFFER
from tiercel.runs.recipe import load_run_recipe, require_no_redaction
from tiercel.types import RewardValue
from tiercel.web.report.reading import read_run
from tiercel.web.report.rollout_table import require_rollouts


def grpo_recipe(output: Path, **sections) -> GrpoRecipe:
    given = {
        "model": Model(path="Qwen/Qwen2-VL-2B-Instruct"),
        "lora": Lora(rank=8),
        "data": Data(train="rows.jsonl"),
        "rewards": (Exact(), Format(weight=0.2)),
        "train": Train(steps=10),
    }
    return GrpoRecipe(**given | sections, output=str(output))


def sft_recipe(output: Path, **sections) -> SftRecipe:
    given = {"model": Model(path="m"), "data": Data(train="rows.jsonl"), "train": Train(steps=10)}
    return SftRecipe(**given | sections, output=str(output))


@pytest.fixture
def run(tmp_path) -> Iterator[RunDirectory]:
    """A new GRPO run, held open."""
    with open_run(grpo_recipe(tmp_path / "run")) as opened:
        yield opened


def make(recipe: SftRecipe | GrpoRecipe) -> None:
    """Open a run and end."""
    with open_run(recipe):
        pass


def make_a_step(recipe: SftRecipe | GrpoRecipe) -> None:
    """Open a run, finish a step, and end."""
    with open_run(recipe) as run:
        run.record({"step": 1, "loss": 0.5})


def test_a_new_run_has_its_files(tmp_path):
    recipe = grpo_recipe(tmp_path / "deep" / "run")
    with open_run(recipe) as run:
        assert run.path == tmp_path / "deep" / "run"
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        ".lock",
        "config.yaml",
        "end.json",
        "env.json",
        "rollouts",
        "evaluations",
        "tokens",
        "images",
        "checkpoints",
    }
    assert (run.path / "config.yaml").read_text().startswith("# tiercel grpo\n")
    assert load_run_recipe(run.path) == recipe
    environment = json.loads((run.path / "env.json").read_text())
    assert {"python", "platform", "packages", "cpu_threads", "gpus", "files", "run"} == set(environment)
    assert "torch" in environment["packages"]


def test_a_run_of_thousands_of_files_is_read_again_and_one_of_too_many_is_refused(tmp_path, monkeypatch):
    files = tuple(f"/data/a/folder/whose/name/is/long/part-{number:05}-of-05000.parquet" for number in range(5000))
    recipe = grpo_recipe(tmp_path / "run", data=Data(train=files))
    make(recipe)
    assert load_run_recipe(tmp_path / "run") == recipe
    assert len(read_run(tmp_path / "run").recipe["data"]["train"]) == 5000
    monkeypatch.setattr("tiercel.runs.directory.LARGEST_TEXT", 1000)
    with pytest.raises(RecipeError, match="1,000"):
        make(recipe)


def test_an_sft_run_keeps_its_kind(tmp_path):
    recipe = sft_recipe(tmp_path / "run", optim=Optim(lr=3e-5, betas=(0.8, 0.95)))
    make(recipe)
    assert load_run_recipe(tmp_path / "run") == recipe


def test_the_same_recipe_opens_it_again(tmp_path):
    recipe = grpo_recipe(tmp_path / "run")
    make(recipe)
    (tmp_path / "run" / "log.txt").write_text("said before")
    make(recipe)
    assert (tmp_path / "run" / "log.txt").read_text() == "said before"


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match=r"not empty and was not created by a run.*name another directory"):
        make(grpo_recipe(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", ("model: {}\n", "# tiercel grpo\nmodel: {}\n", ""))
@pytest.mark.parametrize("beside", ((), ("env.json",), ("rollouts/step-000001.jsonl",)))
def test_a_config_of_something_else_makes_no_run(tmp_path, text, beside):
    """Such as a recipe of that name with `output: .`, or another tool's directory."""
    if beside == ("env.json",) and text.startswith("# tiercel"):
        pytest.skip("that is a run")
    (tmp_path / "config.yaml").write_text(text)
    for name in beside:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with pytest.raises(RunError, match="was not created by a run"):
        make(grpo_recipe(tmp_path))
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("lost", (".lock", "env.json"))
def test_a_run_that_lost_one_of_its_marks_is_still_one(tmp_path, lost):
    recipe = grpo_recipe(tmp_path / "run")
    make(recipe)
    (tmp_path / "run" / lost).unlink()
    make(recipe)


def test_what_a_run_killed_in_its_first_moment_leaves_is_taken(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").touch()
    (run / "config.yaml.tmp").write_text("# tier")
    make(grpo_recipe(run))
    assert load_run_recipe(run) == grpo_recipe(run)


def test_an_empty_directory_is_taken(tmp_path):
    make(grpo_recipe(tmp_path))
    assert (tmp_path / "config.yaml").exists()


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunError, match="is a file; name a directory"):
        make(grpo_recipe(tmp_path / "run"))


def test_a_run_of_the_other_kind_is_refused(tmp_path):
    make_a_step(sft_recipe(tmp_path))
    with pytest.raises(RunError, match="is a run of `tiercel sft`; name another directory"):
        make(grpo_recipe(tmp_path))


def test_a_differing_recipe_names_every_key(tmp_path):
    make_a_step(grpo_recipe(tmp_path, optim=Optim(lr=1e-5)))
    other = grpo_recipe(tmp_path, optim=Optim(lr=2e-5), rewards=(Exact(),), train=Train(steps=10, seed=1))
    with pytest.raises(RunError) as error:
        make(other)
    text = str(error.value)
    assert "optim.lr: was 1e-05, is 2e-05 now" in text
    assert "train.seed: was 0, is 1 now" in text
    assert "rewards.1.name: was 'format', is None now" in text
    assert "optim.betas" not in text and "train.steps" not in text
    assert "lr: 1.0e-05" in (tmp_path / "config.yaml").read_text()  # the run's own recipe is not changed


def test_secrets_of_a_recipe_are_not_kept_and_it_opens_the_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "a phrase of words")
    data = Data(train="rows.jsonl", system="a phrase of words, http://me:word@host")
    recipe = grpo_recipe(tmp_path / "run", data=data)
    make_a_step(recipe)
    assert load_run_recipe(tmp_path / "run").data.system == "[redacted MY_SECRET], http://redacted@host"
    make(recipe)
    other = Data(train="rows.jsonl", system="a phrase of words")
    with pytest.raises(RunError, match=r"data\.system: was '\[redacted MY_SECRET\], http://redacted@host'") as error:
        make(grpo_recipe(tmp_path / "run", data=other))
    assert "a phrase of words" not in str(error.value)
    with pytest.raises(RunError, match=r"config\.yaml: data\.system held a secret and was written without it"):
        require_no_redaction(load_run_recipe(tmp_path / "run"), tmp_path / "run")
    require_no_redaction(recipe, tmp_path / "run")


def test_a_refused_recipe_does_not_keep_the_lock(tmp_path):
    recipe = grpo_recipe(tmp_path)
    make_a_step(recipe)
    with pytest.raises(RunError, match="a different recipe"):
        make(grpo_recipe(tmp_path, optim=Optim(lr=2e-5)))
    make(recipe)


@pytest.mark.parametrize("left", [(), ({"step": 0, "eval/loss": 2.0},)])
def test_a_directory_without_a_finished_step_is_begun_anew(tmp_path, left):
    kept = ["notes.md", "rollouts/notes.md", "journal/step-000001/notes.md"]
    with pytest.raises(RunError, match="out of memory"), open_run(grpo_recipe(tmp_path)) as run:
        for row in left:
            run.record(row)
        journal = "journal/step-000001/rank-0/pending.json"
        for name in ("rollouts/step-000001.jsonl", journal, "chosen.json", "log.txt", *kept):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("of the other recipe")
        assert not run.changed
        raise RunError("out of memory")
    other = grpo_recipe(tmp_path, optim=Optim(lr=2e-5))
    with open_run(other) as run:
        assert run.changed == (ANEW,)
    assert load_run_recipe(tmp_path) == other
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [".lock", "config.yaml", "end.json", "env.json", "log.txt", *kept]
    )
    with open_run(other) as run:
        assert not run.changed


def test_a_directory_without_a_finished_step_may_become_another_kind_or_had_a_recipe_of_another_version(tmp_path):
    make(sft_recipe(tmp_path))
    make(grpo_recipe(tmp_path))
    (tmp_path / "config.yaml").write_text("# tiercel grpo\nmodel: {key_of_another_version: 1}\n")
    make(sft_recipe(tmp_path))
    assert load_run_recipe(tmp_path) == sft_recipe(tmp_path)


def test_a_checkpoint_is_a_finished_step_even_where_it_is_damaged(tmp_path):
    make(grpo_recipe(tmp_path))
    (tmp_path / "checkpoints/step-000002").mkdir()
    with pytest.raises(RunError, match=r"optim\.lr"):
        make(grpo_recipe(tmp_path, optim=Optim(lr=2e-5)))


@pytest.mark.parametrize("lost", ("removed", "a link"))
def test_groups_of_later_steps_are_finished_steps_even_where_the_metrics_are_lost(tmp_path, lost):
    run = tmp_path / "run"
    make(grpo_recipe(run))
    for step in (1, 2):
        (run / "rollouts" / f"step-{step:06d}.jsonl").write_text("{}\n")
    if lost == "a link":
        (run / "rollouts" / "step-000002.jsonl").unlink()
        (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text("{}\n")
    with pytest.raises(RunError, match="made with a different recipe" if lost == "removed" else "is a link"):
        make(grpo_recipe(run, lora=Lora(rank=16)))
    assert (run / "rollouts" / "step-000001.jsonl").exists()


def test_an_adapter_cannot_become_full_fine_tuning(tmp_path):
    make_a_step(grpo_recipe(tmp_path))
    with pytest.raises(RunError, match=r"lora\.rank: was 8"):
        make(grpo_recipe(tmp_path, lora=None))


def test_length_and_intervals_may_differ(tmp_path):
    data = Data(train="rows.jsonl", eval="heldout.jsonl")
    make(grpo_recipe(tmp_path, data=data))
    longer = grpo_recipe(
        tmp_path,
        data=data,
        train=Train(epochs=2.0, save_every=7, eval_every=9, log_every=3, keep=1, strategy="single"),
    )
    make(longer)
    assert load_run_recipe(tmp_path) == longer
    assert {"train.steps", "train.epochs", "output"} <= set(MAY_DIFFER)


def test_every_limit_may_differ(tmp_path):
    make(grpo_recipe(tmp_path))
    make(
        grpo_recipe(
            tmp_path,
            reliability=Reliability(
                stall_timeout=1,
                reward_timeout=2,
                reward_memory_gb=3,
                reward_file_mb=4,
                max_failed_reward_fraction=0.5,
            ),
        )
    )
    assert {f"reliability.{key}" for key in Reliability.model_fields} <= set(MAY_DIFFER)
    assert len(set(MAY_DIFFER)) == len(MAY_DIFFER)


def test_a_run_that_moved_goes_on(tmp_path):
    make(grpo_recipe(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    make(grpo_recipe(tmp_path / "after"))
    assert load_run_recipe(tmp_path / "after").output == str(tmp_path / "after")


def test_a_run_that_another_process_writes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_PATIENCE_SECONDS", 0.3)
    recipe = grpo_recipe(tmp_path / "run")
    make(recipe)
    holder = textwrap.dedent(
        f"""
        import fcntl, os, sys
        lock = os.open({str(tmp_path / "run" / ".lock")!r}, os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
        """
    )
    process = subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="another process is writing"):
            make(recipe)
    finally:
        process.communicate(timeout=30)
    make(recipe)


def test_a_lock_that_is_given_back_soon_is_waited_for(tmp_path):
    recipe = grpo_recipe(tmp_path)
    with open_run(recipe):
        first = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(first, fcntl.LOCK_EX)
    asked = time.monotonic()
    threading.Timer(0.3, os.close, (first,)).start()
    make(recipe)
    assert time.monotonic() - asked > 0.2


def test_a_run_is_held_by_one_at_a_time(run, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_PATIENCE_SECONDS", 0.0)
    with pytest.raises(RunError, match="another process is writing"):
        make(grpo_recipe(run.path))


def test_load_run_recipe_of_no_run(tmp_path):
    with pytest.raises(RunError, match=r"is not a run: it has no config\.yaml"):
        load_run_recipe(tmp_path)


def test_a_folder_with_runs_names_them(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/config.yaml").touch()
    for read in (load_run_recipe, read_run, partial(require_rollouts, step=None)):
        with pytest.raises(RunError, match="but a folder with runs; name one: ") as error:
            read(tmp_path)
        assert f"{tmp_path}/0, " in str(error.value) and str(error.value).endswith(f"{tmp_path}/7 and 2 more")


def fill(run, steps: int) -> None:
    """Rows, rollouts and evaluations of a run that crashed after `steps` updates."""
    run.record({"step": 0, "eval/accuracy": 0.5})
    (run.path / "evaluations" / "step-000000.jsonl").write_text("{}\n")
    for step in range(1, steps + 1):
        run.record({"step": step, "loss": 0.125 * step})
        (run.path / "rollouts" / f"step-{step:06d}.jsonl").write_text("{}\n")
    (run.path / "evaluations" / f"step-{steps:06d}.jsonl").write_text("{}\n")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_resuming_cuts_what_lies_past_the_checkpoint(run):
    fill(run, 5)
    for step in (2, 3):
        save_checkpoint(run.checkpoints, step, lambda directory: None, {"next_index": step})
    found = roll_back_to_checkpoint(run)
    assert found is not None and (found.step, found.state["next_index"]) == (3, 3)
    assert read_metrics(run.path) == [
        {"step": 0, "eval/accuracy": 0.5},
        *({"step": step, "loss": 0.125 * step} for step in (1, 2, 3)),
    ]
    assert names(run.path / "rollouts") == [f"step-00000{step}.jsonl" for step in (1, 2, 3)]
    assert names(run.path / "evaluations") == ["step-000000.jsonl"]


def test_resuming_past_a_damaged_checkpoint_cuts_to_the_older_one(run):
    fill(run, 5)
    for step in (2, 4):
        save_checkpoint(run.checkpoints, step, lambda directory: None, {})
    (directory_of(run.checkpoints, 4) / "state.json").write_text("{}")
    said: list[str] = []
    with printed(said.append):
        found = roll_back_to_checkpoint(run)
    assert found is not None and found.step == 2
    assert [line.split("/")[-1] for line in said] == [
        "step-000004 is passed over: state.json does not have the sha256 of the manifest",
        "step-000004 is kept as step-000004.damaged",
    ]
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2]
    assert names(run.checkpoints) == ["step-000002", "step-000004.damaged"]


def test_a_run_of_which_no_checkpoint_can_be_used_does_not_begin_anew(run):
    fill(run, 5)
    for step in (2, 4):
        save_checkpoint(run.checkpoints, step, lambda directory: None, {})
        (directory_of(run.checkpoints, step) / "state.json").write_text("{}")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=f"mv {run.checkpoints} {run.checkpoints}.damaged") as caught:
        roll_back_to_checkpoint(run)
    assert all(f"step-00000{step} is passed over: state.json" in str(caught.value) for step in (2, 4))
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    run.checkpoints.rename(f"{run.checkpoints}.damaged")
    assert roll_back_to_checkpoint(run) is None


def test_without_a_checkpoint_everything_is_cut(run):
    fill(run, 3)
    assert roll_back_to_checkpoint(run) is None
    assert read_metrics(run.path) == []
    assert names(run.path / "rollouts") == names(run.path / "evaluations") == []


def test_a_fresh_run_has_nothing_to_resume(run):
    assert roll_back_to_checkpoint(run) is None
    assert not run.metrics_file.exists()


def test_a_last_line_that_a_crash_cut_is_left_out_and_not_continued(run):
    fill(run, 3)
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3]
    save_checkpoint(run.checkpoints, 3, lambda directory: None, {})
    roll_back_to_checkpoint(run)
    run.record({"step": 4})
    assert [row["step"] for row in read_metrics(run.path)] == [0, 1, 2, 3, 4]


def test_a_row_that_is_not_finite_is_refused_and_not_half_written(run):
    run.record({"step": 0, "loss": 1.0})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.record({"step": 1, "loss": float("nan")})
    assert run.metrics_file.read_text() == '{"step": 0, "loss": 1.0}\n'


def test_groups_are_recorded_with_each_image_once(run):
    failed = RewardValue(value=None, failure="timed out")
    group = scored_group(scored(0.5, True, iou=RewardValue(value=0.5)), scored(None, None, iou=failed))
    family = SimpleNamespace(coordinate_space="thousandths")
    with run.recording("rollouts", 7, family) as record:
        record([group, group], [[1.5, None], [None, None]])

    first, second = (
        json.loads(line) for line in (run.path / "rollouts" / "step-000007.jsonl").read_text().splitlines()
    )
    assert first["coordinate_space"] == "thousandths"
    assert (first["id"], first["question"], first["policy_version"]) == ("row-1", "Where is the 7?", 0)
    (image,) = first["images"]
    assert image == {
        "sha256": "0" * 64,
        "path": "a.png",
        "original_size": [200, 100],
        "processed_size": [400, 50],
    }
    good, bad = first["completions"]
    assert (good["rewards"], good["failures"], good["total"]) == ({"iou": 0.5}, {}, 0.5)
    assert (good["correct"], good["advantage"], good["tokens"]) == (True, 1.5, 1)
    assert (bad["rewards"], bad["failures"], bad["total"]) == ({"iou": None}, {"iou": "timed out"}, None)
    assert [completion["advantage"] for completion in second["completions"]] == [None, None]
    run.finish_files()
    assert names(run.path / "images") == ["0" * 64 + ".webp"]
    assert Image.open(run.path / "images" / ("0" * 64 + ".webp")).size == (400, 50)


def test_a_picture_that_does_not_fit_the_disk_is_a_run_error(run, monkeypatch):
    def fail(pixels):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, "webp", fail)
    image = SimpleNamespace(sha256="0" * 64, views=(torch.zeros(2, 2, 3, dtype=torch.uint8),))
    run.save_image(image)
    with pytest.raises(RunError, match=r"images/0+\.webp cannot be written: .*No space left"):
        run.finish_files()


def test_a_step_does_not_wait_for_its_pictures_and_the_end_of_a_run_does(tmp_path, monkeypatch):
    may_go_on, webp = threading.Event(), pictures.webp

    def slow(pixels):
        assert may_go_on.wait(30)
        return webp(pixels)

    monkeypatch.setattr(pictures, "webp", slow)
    pixels = [torch.full((2, 3, 3), number, dtype=torch.uint8) for number in range(3)]
    with open_run(grpo_recipe(tmp_path)) as run:
        for number in (0, 1, 1, 2, 0):
            run.save_image(SimpleNamespace(sha256=str(number) * 64, views=(pixels[number],)))
        assert not any(name.endswith(".webp") for name in names(run.path / "images"))
        may_go_on.set()
    assert names(run.path / "images") == [f"{str(number) * 64}.webp" for number in range(3)]
    for number in range(3):
        assert Image.open(run.path / "images" / f"{str(number) * 64}.webp").getpixel((2, 1)) == (number,) * 3


def test_a_picture_that_could_not_be_saved_is_told_at_the_next_and_ends_the_run(tmp_path, monkeypatch):
    def fail(pixels):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures, "webp", fail)
    image = SimpleNamespace(sha256="0" * 64, views=(torch.zeros(2, 2, 3, dtype=torch.uint8),))
    with pytest.raises(RunError, match="No space left"), open_run(grpo_recipe(tmp_path / "end")) as run:
        run.save_image(image)
    with pytest.raises(RuntimeError, match="another"), open_run(grpo_recipe(tmp_path / "other")) as run:
        run.save_image(image)
        raise RuntimeError("another")
