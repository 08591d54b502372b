"""Where commands write for their user: a file that cannot be written ends with its path, the reason and exit code 2."""

import errno
import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import SafetensorError

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.errors import RunError
from tiercel.web.report import page
from tiercel.writing import write_text, writing

COMMAND = "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-VL-3B-Instruct --dataset rows.jsonl"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EROFS, "Read-only file system", "/there/file"), "Read-only file system"),
        (OSError(errno.EACCES, "Permission denied", "/there"), "Permission denied (/there)"),
        (OSError("odd"), "odd"),
        (SafetensorError("I/O error: No space left"), "I/O error: No space left"),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), "[Errno 28] No space left on device"),
    ],
)
def test_what_cannot_be_written_is_told_in_one_way(error, words):
    with pytest.raises(RunError) as caught, writing(Path("/there/file"), "name another"):
        raise error
    assert str(caught.value) == f"/there/file cannot be written: {words}; name another"
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def run(tiny_checkpoints, tmp_path_factory) -> Path:
    """Create a run of one step, with its recipe next to it."""
    work = tmp_path_factory.mktemp("writing")
    changes = {"data": {"eval": None, "workers": 0}, "train": {"steps": 1}}
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(work), work / "run", **changes)
    (work / "sft.yaml").write_text(recipe_to_yaml(recipe))
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], work / "rows.jsonl", work / "grpo", **changes)
    (work / "grpo.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["sft", str(work / "sft.yaml")]) == 0
    return work / "run"


def _below_a_file(work: Path) -> Path:
    (work / "file").write_text("mine")
    return work / "file" / "out"


def _in_a_folder_that_allows_nobody(work: Path) -> Path:
    return Path("/proc/sys/out")


def _with_too_long_a_name(work: Path) -> Path:
    return work / ("x" * 300)


def _a_folder_that_is_not_there(work: Path) -> Path:
    return work / "missing" / "out"


PLACES = (_below_a_file, _in_a_folder_that_allows_nobody, _with_too_long_a_name)
FOR_A_FILE: dict[str, Callable[[Path, Path], list[str]]] = {
    "import-command": lambda run, out: ["import-command", COMMAND, "--output", str(out)],
    "data preview": lambda run, out: ["data", "preview", str(run.parent / "sft.yaml"), "--output", str(out)],
    "check --fix-report": lambda run, out: [
        *("check", str(run.parent / "sft.yaml"), "--fix-report", "--report-file", str(out))
    ],
}
FOR_A_FOLDER: dict[str, Callable[[Path, Path], list[str]]] = {
    "sft": lambda run, out: ["sft", str(run.parent / "sft.yaml"), f"output={out}"],
    "grpo": lambda run, out: ["grpo", str(run.parent / "grpo.yaml"), f"output={out}"],
    "export --adapter": lambda run, out: ["export", str(run), "--adapter", "--output", str(out)],
    "export --merge": lambda run, out: ["export", str(run), "--merge", "--output", str(out)],
}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__.strip("_"))
@pytest.mark.parametrize("verb", [*FOR_A_FILE, *FOR_A_FOLDER])
def test_a_verb_whose_output_cannot_be_written_says_so(verb, place, run, tmp_path, capsys):
    out = place(tmp_path)
    assert main({**FOR_A_FILE, **FOR_A_FOLDER}[verb](run, out)) == 2
    said = capsys.readouterr().err
    assert f"{out} cannot be written: " in said and "; name another" in said and "Traceback" not in said


@pytest.mark.parametrize("verb", FOR_A_FILE)
@pytest.mark.parametrize("place", [_a_folder_that_is_not_there, lambda work: work])
def test_a_file_is_not_written_over_a_folder_nor_into_one_that_is_not_there(verb, place, run, tmp_path, capsys):
    out = place(tmp_path)
    assert main(FOR_A_FILE[verb](run, out)) == 2
    assert f"{out} cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("verb", FOR_A_FOLDER)
def test_a_folder_is_not_made_where_a_file_is(verb, run, tmp_path, capsys):
    out = tmp_path / "file"
    out.write_text("mine")
    assert main(FOR_A_FOLDER[verb](run, out)) == 2
    said = capsys.readouterr().err
    assert "output: " in said and "is a file" in said and "Traceback" not in said
    assert out.read_text() == "mine"


def test_a_report_that_cannot_be_written_says_so(run, monkeypatch, capsys):
    monkeypatch.setattr(page, "FILE", "x" * 300)
    assert main(["report", str(run)]) == 2
    assert "cannot be written: File name too long" in capsys.readouterr().err


def test_a_full_disk_says_so_and_leaves_no_traceback(run, tmp_path, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    with suppress(OSError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            try:
                for words in (FOR_A_FILE["data preview"](run, disk / "page"), FOR_A_FOLDER["sft"](run, disk / "run"),
                              FOR_A_FOLDER["export --merge"](run, disk / "model")):  # fmt: skip
                    assert main(words) == 2
                    said = capsys.readouterr().err
                    assert "cannot be written: " in said and "No space left" in said and "Traceback" not in said
            finally:
                subprocess.run(["umount", str(disk)], check=True)
            return
    pytest.skip("no memory disk may be mounted here")


def test_what_can_be_written_is(tmp_path):
    write_text(tmp_path / "file", json.dumps("ü"))
    assert json.loads((tmp_path / "file").read_text(encoding="utf-8")) == "ü"
