"""Files of steps, plain and compressed."""

import gzip
from pathlib import Path

import pytest
import zstandard

from tests.runs.test_directory import grpo_recipe
from tiercel.regular_files import OddFile
from tiercel.runs import step_files
from tiercel.runs.checkpoints import save_checkpoint
from tiercel.runs.directory import open_run, roll_back_to_checkpoint
from tiercel.runs.records import groups_path
from tiercel.runs.step_files import lines_of_step, open_step, pack_step, read_step, step_of, steps_of

LINES = '{"id": "a", "text": "\u2019"}\n{"id": "b"}\n'


def written(run: Path, step: int) -> Path:
    file = groups_path(run, "rollouts", step)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(LINES, encoding="utf-8")
    return file


def test_a_compressed_file_is_read_as_the_plain_one_was(tmp_path):
    file = written(tmp_path, 3)
    pack_step(tmp_path, 3)
    pack_step(tmp_path, 3)
    assert [each.name for each in file.parent.iterdir()] == ["step-000003.jsonl.zst"]
    packed = (file.parent / "step-000003.jsonl.zst").read_bytes()
    assert zstandard.decompress(packed).decode() == read_step(file) == LINES
    assert b"".join(lines_of_step(file)).decode() == LINES and steps_of(file.parent) == (3,)
    with open_step(file) as stream:
        assert stream.seek(28) == 28 and stream.read(5) == LINES.encode()[28:33]
    written(tmp_path, 3)
    pack_step(tmp_path, 3)
    assert (file.parent / "step-000003.jsonl.zst").read_bytes() == packed  # no time and no name in it


@pytest.mark.parametrize(
    ("name", "step"),
    (
        ("step-000012.jsonl", 12),
        ("step-000012.jsonl.zst", 12),
        ("step-000012.jsonl.gz", 12),
        ("step-12.jsonl", None),
        ("step-000012.jsonl.tmp", None),
    ),
)
def test_steps_by_name(name, step):
    assert step_of(name) == step


def test_a_file_of_an_older_version_is_read_and_left_as_it_is(tmp_path):
    file = written(tmp_path, 3)
    file.with_name(file.name + ".gz").write_bytes(gzip.compress(LINES.encode()))
    file.unlink()
    pack_step(tmp_path, 3)
    assert [each.name for each in file.parent.iterdir()] == ["step-000003.jsonl.gz"]
    assert read_step(file) == LINES and steps_of(file.parent) == (3,)


COMPRESS = {".zst": zstandard.compress, ".gz": gzip.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_cut_short_or_expands_beyond_measure_is_refused(tmp_path, monkeypatch, suffix):
    file = written(tmp_path, 1)
    packed = file.with_name(file.name + suffix)
    whole = COMPRESS[suffix](file.read_bytes() * 9)
    file.unlink()
    for data in (whole[:-4], whole[:12] + b"\xff" * 9, b"neither"):
        packed.write_bytes(data)
        with pytest.raises(OSError):
            read_step(file)
    packed.write_bytes(COMPRESS[suffix](bytes(3000)))
    monkeypatch.setattr(step_files, "LARGEST_FILE", 2999)
    with pytest.raises(OddFile, match="expands to more than the 2,999 bytes"):
        open_step(file)
    packed.unlink()
    packed.symlink_to(written(tmp_path / "other", 1))
    with pytest.raises(OddFile, match="is a link"):
        read_step(file)


def test_a_frame_that_does_not_say_its_size_is_read(tmp_path):
    file = written(tmp_path, 1)
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(file.read_bytes())
    file.with_name(file.name + ".zst").write_bytes(packed)
    file.unlink()
    assert read_step(file) == LINES


def test_a_run_compresses_what_is_100_steps_old_and_cuts_it_on_resuming(tmp_path):
    recipe = grpo_recipe(tmp_path / "run")

    def go(run, first: int, last: int) -> None:
        for step in range(first, last + 1):
            written(run.path, step)
            run.record({"step": step})

    with open_run(recipe) as run:
        go(run, 1, 3)
        save_checkpoint(run.checkpoints, 3, lambda directory: None, {})
        go(run, 4, 106)
    folder = tmp_path / "run" / "rollouts"
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert sorted(name for name in whole if name.endswith(".zst")) == [f"step-00000{n}.jsonl.zst" for n in range(1, 7)]
    assert len(whole) == 106
    with open_run(recipe) as run:
        roll_back_to_checkpoint(run)
        assert sorted(file.name for file in folder.iterdir()) == [f"step-00000{n}.jsonl.zst" for n in (1, 2, 3)]
        go(run, 4, 106)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
