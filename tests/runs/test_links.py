"""Somebody's links, copies and folders in a run directory: nothing is written through them, and they stay."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.runs.test_directory import grpo_recipe, make, make_a_step
from tiercel.data.rejected_rows import write_bad_rows
from tiercel.errors import RunError
from tiercel.regular_files import FOLDERS, OddFile, make_directory, open_new, open_regular, open_to_append, remove
from tiercel.reliability.stall import RankStatus
from tiercel.reliability.stall_files import RankStatusFiles, write_stacks, write_status
from tiercel.runs.directory import open_run, roll_back_to_checkpoint
from tiercel.runs.publishing import Publisher
from tiercel.training.grpo.journal import FOLDER, keep_in_journal
from tiercel.training.nonfinite_guard import copy_rollouts
from tiercel.training.offline.precomputed import _write as write_reference
from tiercel.types import RejectedRow
from tiercel.web.report.page import write_report

KEY = "the key of somebody"


@pytest.fixture
def key(tmp_path) -> Path:
    """A file outside the run, to which links lead."""
    file = tmp_path / "key"
    file.write_text(KEY)
    return file


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A folder outside the run, with a file in it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "thesis.txt").write_text(KEY)
    return folder


def status() -> RankStatus:
    return RankStatus(rank=0, phase="rollout", phases=1, step=1, quiet_seconds=0.0, limit_seconds=9.0)


TEMPORARY = ("config.yaml.tmp", "env.json.tmp", "end.json.tmp", "report.html.tmp", "metrics.jsonl.tmp")


def test_temporary_files_are_not_written_through(tmp_path, key):
    run = tmp_path / "run"
    make_a_step(grpo_recipe(run))
    for name in (*TEMPORARY, "report.html", "end.json"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(key)
    with open_run(grpo_recipe(run)) as opened:
        roll_back_to_checkpoint(opened)
    write_report(run)
    assert key.read_text() == KEY and KEY not in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ("metrics.jsonl", "log.txt", "bad_rows.jsonl", "index.jsonl"))
def test_a_file_that_grows_is_neither_read_nor_written_through(tmp_path, key, name):
    run = tmp_path / "run"
    make(grpo_recipe(run))
    (run / name).symlink_to(key)
    if name == "bad_rows.jsonl":
        with pytest.raises(RunError, match="is a link"):
            write_bad_rows([RejectedRow(file="rows.jsonl", line=1, id="r1", field="images", reason="none")], run / name)
    elif name == "metrics.jsonl":
        with pytest.raises(RunError, match="is a link"), open_run(grpo_recipe(run)) as opened:
            opened.record({"step": 1, "loss": 0.5})
    try:
        write_report(run)
    except RunError as error:
        assert KEY not in str(error)
    assert key.read_text() == KEY
    assert not (run / "report.html").exists() or KEY not in (run / "report.html").read_text()


def test_files_of_a_stall_are_not_written_through(tmp_path, key, elsewhere):
    run = tmp_path / "run"
    (run / "signs").mkdir(parents=True)
    for name in ("signs/rank-0.tmp", "signs/rank-0.json", "pulse/rank-0.tmp", "stall/rank-0.txt"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(key)
    RankStatusFiles(run / "signs", 1).write(status())
    write_status(run / "pulse" / "rank-0.json", status())
    write_stacks(run / "stall", 0)
    assert key.read_text() == KEY and json.loads((run / "pulse" / "rank-0.json").read_text())["phase"] == "rollout"
    (run / "linked").symlink_to(elsewhere)
    write_status(run / "linked" / "rank-0.json", status())
    with pytest.raises(OSError, match="is a link"):
        write_stacks(run / "linked", 0)
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.txt"]


def test_the_journal_keeps_to_its_own_names(tmp_path, elsewhere):
    folder = tmp_path / FOLDER
    for name in ("step-000001", "step-000001 (copy)", "step-thesis"):
        for rank in ("rank-0", "rank-5"):  # the second one is gone
            (folder / name / rank).mkdir(parents=True)
    (folder / "step-000002").symlink_to(elsewhere)
    for rank in ("rank-0", "rank-5"):
        (elsewhere / rank).mkdir()
    (folder / "rank-0.tmp").symlink_to(elsewhere)
    keep_in_journal(tmp_path, 0, 3, [], world_size=2)
    kept = {path.parent.name for path in folder.glob("*/rank-0")}
    assert kept == {"step-000001 (copy)", "step-thesis", "step-000002", "step-000003"}
    assert {path.parent.name for path in folder.glob("*/rank-5")} == kept - {"step-000003"}
    assert (elsewhere / "thesis.txt").exists() and (elsewhere / "rank-0").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FOLDER).symlink_to(elsewhere)
    with pytest.raises(RunError, match="is a link"):
        keep_in_journal(tmp_path / "other", 0, 3, [])


def test_the_publisher_keeps_to_its_own_names(tmp_path, elsewhere):
    root = tmp_path / "policies"
    publisher = Publisher(tmp_path / "run", root)
    first = publisher.publish(1, lambda directory: (directory / "adapter_model.safetensors").write_text("1"))
    others = [root / f"{first.name} (copy)", root / f"{first.name}.mine", root / "policy-of-mine"]
    for other in others:
        other.mkdir()
    linked = root / re.sub(r"-1-", "-2-", first.name)
    linked.symlink_to(elsewhere)
    (root / f"unfinished-{publisher.run_name}").symlink_to(elsewhere)
    second = publisher.publish(3, lambda directory: (directory / "adapter_model.safetensors").write_text("3"))
    publisher.keep_only([second])
    assert not first.exists() and second.exists()
    publisher.close()
    assert sorted(root.iterdir()) == sorted([*others, linked])
    assert [path.name for path in elsewhere.iterdir()] == ["thesis.txt"]


def test_files_for_a_replay_and_of_the_reference_are_not_written_through(tmp_path, key):
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    (tmp_path / "groups.jsonl").symlink_to(key)
    copy_rollouts(tmp_path, tmp_path / "rollouts.jsonl")
    (tmp_path / "reference.tmp").symlink_to(key)
    write_reference(tmp_path / "reference.safetensors", "identity", {"train": {0: torch.zeros(2)}})
    assert key.read_text() == KEY and (tmp_path / "reference.safetensors").stat().st_size > 0


def test_what_is_removed_is_the_link(tmp_path, key, elsewhere):
    for place, target in (("file", key), ("folder", elsewhere), ("nothing", tmp_path / "none")):
        (tmp_path / place).symlink_to(target)
        remove(tmp_path / place)
        assert not (tmp_path / place).is_symlink()
    remove(tmp_path / "none")
    assert key.exists() and (elsewhere / "thesis.txt").exists()
    (tmp_path / "folder").symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        make_directory(tmp_path / "folder")


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_a_folder_that_is_a_link_is_named_and_nothing_goes_through_it(tmp_path, elsewhere, name):
    run = tmp_path / "run"
    make_a_step(grpo_recipe(run))
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(elsewhere)
    for act in (open_regular, open_to_append, open_new):
        with pytest.raises(OddFile, match=f"run/{name} is a link, which is not followed"):
            act(run / name / "thesis.txt")
    with pytest.raises(RunError, match=f"run/{name} is a link"), open_run(grpo_recipe(run)):
        pass
    assert (elsewhere / "thesis.txt").read_text() == KEY


def test_a_run_that_is_itself_at_a_link_is_read(tmp_path):
    run = tmp_path / "run"
    make_a_step(grpo_recipe(run))
    for name in ("latest", "images"):
        (tmp_path / name).symlink_to(run)
        assert "is a link" not in write_report(tmp_path / name).read_text()
