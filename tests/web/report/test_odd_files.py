"""Runs with something else in place of a file: the report and the list say so and show the rest."""

import os
import struct
import zlib

import pytest

from tests.web.report.fake_runs import make_grounding
from tiercel.errors import RunError
from tiercel.runs.step_files import steps_of
from tiercel.trackers.pictures import rollout_pictures
from tiercel.web.report.page import render
from tiercel.web.report.pictures import MOST_PIXELS, UNREADABLE, Album, opened
from tiercel.web.report.reading import read_groups, read_run


@pytest.fixture
def run(tmp_path):
    return make_grounding(tmp_path / "run", steps=2, rows=4)


@pytest.mark.parametrize("name", ("bad_rows.jsonl", "log.txt", "env.json", "rollouts/step-000001.jsonl"))
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(run, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    page = render(read_run(run))
    assert "cannot be read: is not a regular file" in page and name in page and "Held-out accuracy" in page


@pytest.mark.parametrize("text", ("", "null", "[1]", "[" * 200_000, "a: [", "\x00"))
@pytest.mark.parametrize("name", ("config.yaml", "env.json"))
def test_a_recipe_or_environment_that_is_none_is_named(run, name, text):
    (run / name).write_text(text)
    assert any(problem.startswith(f"{name} is not what the run wrote: ") for problem in read_run(run).problems)


@pytest.mark.parametrize("name", ("rollouts", "evaluations", "images", "tokens"))
def test_a_folder_that_is_a_link_is_named_and_not_shown(run, tmp_path, name):
    (tmp_path / name).mkdir()
    if (run / name).exists():
        (tmp_path / name).rmdir()
        (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name)
    read = read_run(run)
    assert [problem for problem in read.problems if problem.startswith(f"{name} is a link")] and name in render(read)
    assert bool(read.rollout_steps) == (name != "rollouts")
    assert bool(read.evaluation_steps) == (name != "evaluations")
    assert ("data:image/" in render(read)) == (name != "images")


def test_metrics_that_cannot_be_read_are_an_error(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("nothing")
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be read: is a link, which is not followed"):
        read_run(run)


def test_copies_of_a_steps_file_are_no_steps(run):
    for name in ("step-000001 (copy).jsonl", "step-1.jsonl", "step-000001.jsonl.orig", ".step-000002.jsonl"):
        (run / "rollouts" / name).write_bytes((run / "rollouts/step-000001.jsonl").read_bytes())
    assert steps_of(run / "rollouts") == (1, 2)


def test_a_small_file_of_a_large_picture_is_not_decoded(run):
    sha256 = read_groups(read_run(run), "rollouts", 1).groups[0].images[0].sha256
    file = run / "images" / f"{sha256}.png"
    file.write_bytes(png_header(13_000, 13_000))
    with pytest.raises(UNREADABLE, match=f"13000 x 13000 pixels are more than {MOST_PIXELS:,}"):
        opened(file)
    album = Album(run / "images")
    assert album.take(sha256) is None and "13000 x 13000 pixels" in album.missing[sha256]
    assert f"The first is {sha256}.png: 13000 x 13000 pixels are more than" in render(read_run(run))
    with pytest.raises(UNREADABLE, match="13000 x 13000 pixels"):
        rollout_pictures(run, 1)


def png_header(width, height):
    """A grey picture without its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
