"""Files of rows at URLs of fsspec: copied once, read from the copy, within a bounded cache."""

import fcntl
import json
import os
import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from tests.training.test_loops import sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.data import Data
from tiercel.config.row_sources import RowSource, row_source
from tiercel.data import remote
from tiercel.data.reading import read_rows
from tiercel.data.rejected_rows import write_fix_report
from tiercel.data.remote import parts_of
from tiercel.errors import DataError, EnvironmentProblem, RunError


class Flaky(MemoryFileSystem):
    """A store that fails as often as it is told, when a file is asked for or in the middle of it."""

    protocol = "flaky"
    store, pseudo_dirs = {}, [""]
    failures, breaks, opened = 0, 0, []

    def info(self, path, **more):
        self._fail()
        return super().info(path, **more)

    def open(self, path, mode="rb", **more):
        if mode == "wb":
            return super().open(path, mode, **more)
        Flaky.opened.append(path)
        self._fail()
        stream = super().open(path, mode, **more)
        read, calls = stream.read, []

        def breaking(size=-1):
            calls.append(size)
            if len(calls) == 2 and Flaky.breaks:
                Flaky.breaks -= 1
                raise RuntimeError("reset by https://store.test/x?X-Amz-Signature=5ecre7")
            return read(size)

        stream.read = breaking
        return stream

    def _fail(self):
        if Flaky.failures:
            Flaky.failures -= 1
            raise RuntimeError("503 of https://store.test/x?X-Amz-Signature=5ecre7")


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    monkeypatch.setattr(remote, "_BLOCK", 64)
    monkeypatch.setattr(remote, "_in_use", {})
    monkeypatch.setattr(Flaky, "opened", [])
    yield
    for used in remote._in_use.values():
        os.close(used)
    for kind in (MemoryFileSystem, Flaky):
        kind.store.clear()
        kind.failures = kind.breaks = 0


def text_of(count, word="a"):
    rows = ({"messages": [{"role": "user", "content": word}], "answer": str(number)} for number in range(count))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def put(url, data):
    with fsspec.open(url, "wb") as stream:
        stream.write(data)


def recipe(tmp_path, train, **more):
    return Data(train=train, cache=str(tmp_path / "cache"), **more)


def rows_of(data):
    return read_rows(data.train, data, "grpo")


def test_the_forms_of_urls():
    assert row_source("s3://b/rows/*.jsonl#3") == RowSource(path="s3://b/rows/*.jsonl", count=3)
    assert row_source("hf://datasets/o/n/a.parquet").is_remote and not row_source("hf:o/n").is_remote
    for wrong in (
        "s3://u:secret@b/r.jsonl",
        "https://h/r.jsonl?a=1&X-Amz-Signature=2",
        "gs://b/r?token=abc",
        "zip://a::s3://b",
    ):
        with pytest.raises(ValueError, match=r"password|chained"):
            row_source(wrong)
    assert row_source("abfs://box@account.dfs.core.windows.net/r.jsonl").is_remote


def test_rows_are_those_of_the_file_and_are_named_by_the_url(tmp_path):
    put("memory://box/rows.jsonl", text_of(3) + b"{broken\n")
    table = rows_of(recipe(tmp_path, "memory://box/rows.jsonl"))
    assert [row.id for row in table.rows] == ["rows:1", "rows:2", "rows:3"] and table.file == "memory://box/rows.jsonl"
    (bad,) = table.rejected
    assert (bad.file, bad.line) == ("memory://box/rows.jsonl", 4)
    assert write_fix_report([bad], tmp_path / "report.jsonl", recipe(tmp_path, "")) == 1
    assert json.loads((tmp_path / "report.jsonl").read_text())["row"] == "{broken"


def test_a_pattern_names_several_files_and_a_count_some_rows(tmp_path):
    for name, count in (("a", 2), ("b", 3)):
        put(f"memory://box/{name}.jsonl", text_of(count))
    table = rows_of(recipe(tmp_path, "memory://box/*.jsonl"))
    assert [row.id for row in table.rows] == ["a:1", "a:2", "b:1", "b:2", "b:3"]
    assert table.rows[0].file == "memory:///box/a.jsonl"
    assert len(rows_of(recipe(tmp_path, "memory://box/*.jsonl#4")).rows) == 4
    with pytest.raises(DataError, match="no file matches"):
        rows_of(recipe(tmp_path, "memory://box/*.parquet"))
    with pytest.raises(DataError, match=r"memory://box/\*\.parquet"):
        rows_of(recipe(tmp_path, "memory://box"))


def test_parquet_is_read_as_it_is(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    data = recipe(tmp_path, f"file://{tmp_path}/*.parquet")
    assert [row.answer for row in rows_of(data).rows] == ["1", "2"]


def test_a_copy_is_made_once_and_again_if_the_file_changes(tmp_path, caplog):
    put("flaky://box/rows.jsonl", text_of(3))
    data = recipe(tmp_path, "flaky://box/rows.jsonl")
    assert len(rows_of(data).rows) == len(rows_of(data).rows) == 3 and len(Flaky.opened) == 1
    put("flaky://box/rows.jsonl", text_of(3, "b"))
    Flaky.opened.clear()
    assert rows_of(data).rows[0].messages[0].content == "b" and len(Flaky.opened) == 1
    (told,) = [each for each in caplog.messages if "has changed since it was copied" in each]
    assert told.startswith("flaky://box/rows.jsonl")
    (copy,) = (tmp_path / "cache" / "files").glob("*/rows.jsonl")
    copy.write_bytes(b"half")
    assert len(rows_of(data).rows) == 3 and not list(copy.parent.glob("*.part"))


def test_failures_pass_and_a_broken_copy_goes_on(tmp_path):
    put("flaky://box/rows.jsonl", text_of(9))
    Flaky.failures, Flaky.breaks = 2, 3
    assert len(rows_of(recipe(tmp_path, "flaky://box/rows.jsonl")).rows) == 9
    assert (Flaky.failures, Flaky.breaks, len(Flaky.opened)) == (0, 0, 4)


def test_a_store_that_keeps_failing_is_named_without_signatures(tmp_path):
    put("flaky://box/rows.jsonl", text_of(1))
    Flaky.failures = 10**6
    with pytest.raises(
        DataError, match=r"flaky://box/rows.jsonl: cannot be read: RuntimeError: 503 .* \(tried 4"
    ) as raised:
        rows_of(recipe(tmp_path, "flaky://box/rows.jsonl"))
    assert "5ecre7" not in str(raised.value)


def test_a_copy_that_breaks_off_for_good_leaves_nothing(tmp_path, monkeypatch):
    def broken(file):
        yield b"a part of it"
        raise DataError("cannot be read")

    monkeypatch.setattr(remote, "_blocks", broken)
    put("flaky://box/rows.jsonl", text_of(9))
    with pytest.raises(DataError, match="cannot be read"):
        rows_of(recipe(tmp_path, "flaky://box/rows.jsonl"))
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_the_query_of_an_address_is_no_part_of_a_copys_name():
    url = "https://h.test/a/rows.jsonl?download=true"
    assert remote._File(url=url, path=url, store=None, size=1, state="").name == "rows.jsonl"


def test_a_store_that_stalls_is_asked_again_and_then_named(tmp_path, monkeypatch):
    put("flaky://box/rows.jsonl", text_of(9))
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.2)
    wake, open_file, stalls = threading.Event(), Flaky.open, []

    def stalling(self, path, mode="rb", **more):
        stream = open_file(self, path, mode, **more)
        read = stream.read

        def slow(size=-1):
            if stream.tell() and stalls:
                stalls.pop()
                wake.wait(60)
                return b""
            return read(size)

        stream.read = slow
        return stream

    monkeypatch.setattr(Flaky, "open", stalling)
    stalls[:] = [1, 2]
    assert len(rows_of(recipe(tmp_path, "flaky://box/rows.jsonl")).rows) == 9 and stalls == []
    monkeypatch.setattr(Flaky, "info", lambda *_, **__: wake.wait(60))
    with pytest.raises(DataError, match=r"flaky://box/rows.jsonl: .* no answer for 0.2 s \(tried 4 times\)"):
        rows_of(recipe(tmp_path, "flaky://box/rows.jsonl"))
    wake.set()


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"memory://box/gone\.jsonl: cannot be read: FileNotFoundError"):
        rows_of(recipe(tmp_path, "memory://box/gone.jsonl"))
    with pytest.raises(DataError, match="qqzz"):
        rows_of(recipe(tmp_path, "qqzz://box/gone.jsonl"))
    (tmp_path / "cache").write_text("mine")
    put("memory://box/rows.jsonl", text_of(1))
    with pytest.raises(RunError, match="cannot be written"):
        rows_of(recipe(tmp_path, "memory://box/rows.jsonl"))


def test_a_file_of_unknown_length_is_refused_with_what_to_do(tmp_path, monkeypatch):
    put("flaky://box/rows.jsonl", text_of(1))
    monkeypatch.setattr(Flaky, "info", lambda *_, **__: {"name": "/box/rows.jsonl", "size": None, "type": "file"})
    with pytest.raises(DataError, match=r"does not say how long \S+/rows\.jsonl is; download it, and name your copy"):
        rows_of(recipe(tmp_path, "flaky://box/rows.jsonl"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    about = {"class": "a_package_that_is_not_there.Store", "err": "Install s3fs to access S3"}
    monkeypatch.setitem(known_implementations, "s9", about)
    with pytest.raises(EnvironmentProblem, match=r"s9://box/rows\.jsonl: this needs .* Install s3fs"):
        rows_of(recipe(tmp_path, "s9://box/rows.jsonl"))


def test_the_cache_is_bounded(tmp_path):
    size = len(text_of(4))
    data = recipe(tmp_path, "", cache_bytes=3 * size)
    for number in range(5):
        put(f"memory://box/{number}.jsonl", text_of(4))

    def copied(*numbers):
        found = [parts_of(row_source(f"memory://box/{number}.jsonl"), data)[0] for number in numbers]
        for key in list(remote._in_use):  # as if the process had ended
            os.close(remote._in_use.pop(key))
        return found

    def there():
        return sorted(file.stem for file in (tmp_path / "cache" / "files").glob("*/*.jsonl"))

    first, second = copied(0, 1)
    about = [os.path.join(os.path.dirname(each.path), "copy.json") for each in (first, second)]
    for number, each in enumerate(about):
        os.utime(each, (number, number))
    copied(2)
    assert there() == ["1", "2"]  # the sizes of copy.json count too
    with open(os.path.dirname(second.path) + ".used", "ab") as used:  # another process reads the second
        fcntl.flock(used, fcntl.LOCK_SH)
        copied(3)
        assert there() == ["1", "3"]
    with pytest.raises(DataError, match=r"data\.cache_bytes"):
        parts_of(row_source("memory://box/*.jsonl"), data)


def test_a_run_reads_rows_at_a_url_and_resumes(tiny_checkpoints, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path)
    monkeypatch.setenv("STORE_SECRET_KEY", "5ecre7-of-a-store")
    made = sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", data={"image_root": str(tmp_path)})
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(recipe_to_yaml(made))
    words = ["sft", str(recipe_file), f"data.train=file://{rows}", f"data.cache={tmp_path / 'cache'}"]
    assert main([*words, "train.steps=1"]) == 0
    assert main([*words, "train.steps=2"]) == 0
    assert len(list((tmp_path / "cache" / "files").glob("*/rows.jsonl"))) == 1
    written = b"".join(file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file())
    assert b"file://" in written and b"5ecre7-of-a-store" not in written
