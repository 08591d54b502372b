"""Files of a run directory that somebody has replaced with something else."""

import os

import pytest

from tiercel.errors import RunError
from tiercel.regular_files import OddFile, lines_of, open_new, open_regular, open_to_append, read_json, read_text
from tiercel.runs.directory import read_metrics
from tiercel.runs.fresh_start import has_no_step
from tiercel.runs.json_lines import lines_from_end


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("key")
    return file


ODD = {
    "a link": lambda path, secret: path.symlink_to(secret),
    "a link to nothing": lambda path, secret: path.symlink_to("nothing"),
    "a pipe": lambda path, secret: os.mkfifo(path),
    "a device": lambda path, secret: path.symlink_to("/dev/zero"),
    "a directory": lambda path, secret: path.mkdir(),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_neither_read_nor_written_and_nothing_waits(tmp_path, secret, kind):
    path = tmp_path / "log.txt"
    ODD[kind](path, secret)
    with pytest.raises(OSError):
        read_text(path)
    with pytest.raises(OSError):
        open_to_append(path)
    assert secret.read_text() == "key" and not (tmp_path / "nothing").exists()


def test_a_file_without_end_is_not_read(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(6 << 30)
    with pytest.raises(OSError, match="6,442,450,944 bytes"):
        read_text(tmp_path / "sparse")
    with open_regular(tmp_path / "sparse") as stream:
        assert stream.read(3) == b"\0\0\0"


def test_a_new_file_takes_the_place_of_a_link(tmp_path, secret):
    path = tmp_path / "report.html.tmp"
    path.symlink_to(secret)
    with open_new(path) as file:
        file.write("é")
    assert secret.read_text() == "key" and not path.is_symlink() and read_text(path) == "é"
    with open_to_append(path) as file:
        file.write("!")
    assert read_text(path) == "é!"


def test_bytes_that_are_no_text_are_replaced(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"a\xff\n")
    assert read_text(tmp_path / "log.txt") == "a\ufffd\n"


def test_a_line_without_end_is_not_read(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as sparse:
        sparse.write(b'{"step": 0, "loss": 1}\n')
        sparse.truncate(6 << 30)
    with pytest.raises(OddFile, match=r"metrics.jsonl has a line of more than"):
        list(lines_of(file))
    with pytest.raises(OddFile, match="has a line of more than"):
        list(lines_from_end(file))
    with pytest.raises(
        RunError, match=r"has a line of more than 134,217,728 bytes; this is not what the run wrote; restore"
    ):
        has_no_step(begun(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"), ((b"{", "is no JSON"), (b"\xff", "is no JSON"), (b"[" * 100_000, "is nested too deeply"))
)
def test_what_is_no_value_is_named(tmp_path, content, reason):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(OddFile, match=f"state.json {reason}"):
        read_json(tmp_path / "state.json")


@pytest.mark.parametrize("line", ("null", "[]", "3", '{"step": NaN}', '{"step": true}', "[" * 100_000, "\ufffd"))
def test_a_line_of_metrics_that_is_no_row_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n{{"st')
    with pytest.raises(RunError, match=r"metrics.jsonl:2 is not a row with a step"):
        read_metrics(tmp_path)


def test_metrics_that_are_no_file_are_named_and_the_run_is_not_taken_for_one_without_a_step(tmp_path):
    begun(tmp_path)
    os.mkfifo(tmp_path / "metrics.jsonl")
    for read in (read_metrics, has_no_step):
        with pytest.raises(
            RunError,
            match=r"metrics.jsonl: cannot be read: is not a regular file; this is not what the run wrote; restore",
        ):
            read(tmp_path)


def begun(run):
    (run / "config.yaml").write_text("# tiercel sft\n")
    (run / "env.json").write_text("{}")
    return run
