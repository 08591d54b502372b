"""Writing so that a reader sees either the old file or the new one."""

import hashlib
import json
import os

import pytest

from tiercel.runs.files import file_sha256, json_line, write_atomically


def test_written_whole_and_nothing_beside_it(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "first\n")
    write_atomically(path, "zweite Zeile: ä\n")
    assert path.read_bytes() == "zweite Zeile: ä\n".encode()
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_atomically(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_hash_of_a_file(tmp_path):
    path = tmp_path / "data"
    content = bytes(range(256)) * 10_000
    path.write_bytes(content)
    assert file_sha256(path) == hashlib.sha256(content).hexdigest()


def test_a_line_of_json():
    assert json_line({"step": 1, "text": "é\n"}) == '{"step": 1, "text": "é\\n"}\n'


def test_a_line_of_json_has_no_secrets(monkeypatch):
    secret = 'one "two"\\three'
    monkeypatch.setenv("MY_SECRET", secret)
    line = json_line({"failure": f"ValueError({secret!r})", "text": secret, "tokens": [1, 2]})
    assert json.loads(line) == {
        "failure": "ValueError('[redacted MY_SECRET]')",
        "text": "[redacted MY_SECRET]",
        "tokens": [1, 2],
    }
    assert json_line({"url": "http://me:word@host"}) == '{"url": "http://redacted@host"}\n'


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_numbers_that_json_does_not_know_are_refused(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line({"loss": value})
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line({"rewards": {"iou": [value]}})
