"""Lines read from the end of a file, and files cut there, against plain lists of lines."""

import json
import random

import pytest

from tiercel.runs import json_lines
from tiercel.runs.json_lines import Rows, blocks_of_lines, cut_lines, lines_from_end


@pytest.mark.parametrize("block", (1, 7, 64, 1 << 16))
@pytest.mark.parametrize("text", ("", "\n", "a", "a\n", "a\nbb\n\nccc", "é\n" * 40, "x" * 200 + "\nlast\n"))
def test_lines_from_the_end_are_those_of_the_file(tmp_path, monkeypatch, block, text):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
    file = tmp_path / "file"
    file.write_bytes(text.encode())
    lines = text.encode().splitlines(keepends=True)
    found = list(lines_from_end(file))[::-1]
    assert [line for _, line in found] == lines
    assert all(text.encode()[start : start + len(line)] == line for start, line in found)


@pytest.mark.parametrize("block", (1, 7, 64))
@pytest.mark.parametrize("text", ("", "\n", "a", "a\n", "a\nbb\n\nccc", "é\n" * 40, "x" * 200 + "\nlast\n"))
def test_blocks_have_whole_lines(tmp_path, monkeypatch, block, text):
    monkeypatch.setattr(json_lines, "LINES_BYTES", block)
    monkeypatch.setattr(json_lines, "LONGEST_BLOCKS", 300)
    file = tmp_path / "file"
    file.write_bytes(b"?\n" + text.encode())
    for stop in (None, 2 + len(text.encode()) // 2):
        with file.open("rb") as stream:
            stream.seek(2)
            blocks = list(blocks_of_lines(stream, stop))
        assert b"".join(blocks) == text.encode()[: None if stop is None else stop - 2]
        assert all(block.endswith(b"\n") for block in blocks[:-1])


def test_a_line_without_end_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LINES_BYTES", 10)
    (tmp_path / "file").write_bytes(b"a\n" + b"x" * 10_000)
    with (tmp_path / "file").open("rb") as stream, pytest.raises(OSError, match=r"a line of more than 1,280 bytes"):
        list(blocks_of_lines(stream))


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_file_has_the_rows_up_to_a_step(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 50)
    dice = random.Random(seed)
    file, steps, last = tmp_path / "metrics.jsonl", dice.randint(0, 30), dice.randint(-1, 32)
    rows = [json.dumps({"step": step, "text": "ü" * dice.randint(0, 40)}) + "\n" for step in range(steps)]
    torn = dice.choice(("", '{"step": 3', "\x00\x00"))
    file.write_text("".join(rows) + torn)
    before = file.stat().st_ino
    cut_lines(file, last)
    assert file.read_text() == "".join(rows[: last + 1])
    assert (file.stat().st_ino != before) == bool(torn or last + 1 < steps)


def test_the_end_of_a_file_is_replaced(tmp_path):
    (tmp_path / "file").write_text('{"step": 1}\n{"step": 2}\n')
    cut_lines(tmp_path / "file", 1, b'{"step": 2, "more": 3}\n')
    assert (tmp_path / "file").read_text() == '{"step": 1}\n{"step": 2, "more": 3}\n'
    cut_lines(tmp_path / "file", 2, b'{"step": 3}\n')
    assert (tmp_path / "file").read_text().endswith('"more": 3}\n{"step": 3}\n')


def test_a_last_row_that_only_lacks_its_newline_is_kept_and_gets_one(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}')
    cut_lines(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_rows_are_a_sequence_of_which_the_end_is_read_first(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 64)
    file = tmp_path / "metrics.jsonl"
    assert not Rows(file) and list(Rows(file)) == Rows(file)[-3:] == []
    known = [{"step": step} for step in range(50)]
    file.write_text("".join(json.dumps(row) + "\n" for row in known) + '{"ste')
    rows = Rows(file)
    assert rows and len(rows) == 50 and list(rows) == known
    assert rows[-1] == known[-1] and rows[-7:] == known[-7:] and rows[3:9] == known[3:9] and rows[-80:] == known


def test_a_long_file_from_which_nothing_goes_is_not_read_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with file.open("wb") as sparse:  # a sparse gigabyte, then a row
        sparse.seek(1 << 30)
        sparse.write(b'\n{"step": 7}\n')
    before = file.stat().st_ino
    cut_lines(file, 7)
    assert file.stat().st_ino == before
    assert Rows(file)[-1] == {"step": 7}
