"""The index of a large file gives the same rows, choices, orders and rejections as rows in memory, and is made again if
it does not fit."""

import copy
import json
import os
import pwd
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from PIL import Image

from tiercel.cli.main import main
from tiercel.config.data import Data, HeldOut
from tiercel.data import index, reading, row_files
from tiercel.data.index import FileStore, cache_folder, version
from tiercel.data.reading import read_rows, read_run_rows
from tiercel.data.stores import UnusableRow
from tiercel.errors import DataError


def random_lines(draw, count):
    """Lines of rows, some blank, broken, repeated or of two expressions."""
    for number in range(count):
        match draw.randrange(12):
            case 0:
                yield draw.choice(["", "   ", "{broken", "[1]", '{"id": 1, "id": 2}', "\u2028x", '"text"'])
            case 1:
                yield json.dumps({"bbox": [1, 1, 4, 4], "image": "a.png", "sentences": ["left", "right é"]})
            case _:
                id = {"id": f"row-{draw.randrange(2 * count)}"} if draw.random() < 0.8 else {}
                box = draw.choice([[1, 1, 4, 4], [5, 5, 30, 2]])
                text = draw.choice(["cup", "dog\u0085 ü", "x" * draw.randrange(1, 300)])
                yield json.dumps(
                    {**id, "bbox": box, "image": "a.png", "expression": text}, ensure_ascii=number % 2 == 0
                )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a picture, in which files of any size are indexed, in parts of 2,000 bytes; few rows are handled at
    once, and few ids are held."""
    monkeypatch.setattr("tiercel.data.index_sources._CHUNK", 2000)
    monkeypatch.setattr("tiercel.data.index._AT_ONCE", 7)
    monkeypatch.setattr("tiercel.data.index._HELD_ID_BYTES", 100)
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    return tmp_path


def config(place, train, **keys):
    keys = {"prompt": "Where is {prompt}?", "max_bad_fraction": 1.0, "cache": str(place / "cache"), **keys}
    return Data(train=str(train), **keys)


def both(monkeypatch, data, purpose="grpo"):
    """The rows in memory and by the index."""
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 1 << 40)
    held = read_run_rows(data, purpose)
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    return held, read_run_rows(data, purpose)


@pytest.mark.parametrize("seed", range(6))
def test_rows_orders_splits_and_rejections_equal_those_in_memory(place, monkeypatch, seed):
    draw = random.Random(seed)
    for part in range(2):
        text = "\n".join(random_lines(draw, 60)) + ("\n" if seed % 2 else "")
        (place / f"part-{part}.jsonl").write_bytes(b"\xef\xbb\xbf" * (seed % 3 == 0) + text.encode())
    train = [f"{place}/part-0.jsonl", f"{place}/part-*.jsonl", f"{place}/part-0.jsonl#31", f"{place}/part-*.jsonl#50"][
        seed % 4
    ]
    mix = ({"path": f"{place}/part-1.jsonl#20", "weight": 0.5},) if seed % 2 else ()
    keys = {"group_by_prefix": True} if not mix else {}
    data = config(place, train, mix=mix, eval=HeldOut(count=7), columns={"caption": "expression"} if seed == 3 else {})
    for _ in range(2):  # the second time from the index that is there
        held, found = both(monkeypatch, data.model_copy(update=keys), "sft" if seed in (1, 2) else "grpo")
        for one, other in zip(held.tables, found.tables, strict=True):
            assert (one.rejected, one.counts, one.without, one.format) == (
                other.rejected,
                other.counts,
                other.without,
                other.format,
            )
            assert list(one.rows) == list(other.rows) and one.identity() == other.identity()
            orders = [each.order(3, data.model_copy(update=keys)) for each in (one, other)]
            assert [orders[0].row(index) for index in range(150)] == [orders[1].row(index) for index in range(150)]
        assert list(held.every.ids()) == list(found.every.ids())


def write(file, ids):
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    file.write_text("".join(json.dumps({"id": id, **row}) + "\n" for id in ids))


def read(place, monkeypatch):
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    data = config(place, place / "rows.jsonl")
    return read_rows(data.train, data.model_copy(update={"prompt": None}), "sft")


def test_an_index_is_made_once_and_a_file_that_changed_is_named(place, monkeypatch, caplog):
    write(place / "rows.jsonl", "abc")
    read(place, monkeypatch)
    (head,) = place.glob("cache/rows/*.index")
    made = head.stat().st_mtime_ns
    read(place, monkeypatch)
    assert head.stat().st_mtime_ns == made and caplog.messages == []
    write(place / "rows.jsonl", "xyz")
    assert [row.id for row in read(place, monkeypatch).rows] == ["x", "y", "z"]
    assert len(caplog.messages) == 1 and "has changed" in caplog.text and str(place / "rows.jsonl") in caplog.text


def break_head(data):
    return data[:-20] + b"{" + data[-19:]


def break_column(data):
    return data[:3] + bytes([data[3] ^ 1]) + data[4:]


def cut(data):
    return data[:-5]


def lose_rows(data):
    return data[64:]


def lose_all(data):
    return b""


def age(data):
    return data.replace(version().encode(), b"0123456789abcdef")


@pytest.mark.parametrize("harm", [break_head, break_column, cut, lose_rows, lose_all, age])
def test_an_index_that_is_damaged_or_of_another_version_is_made_again(place, monkeypatch, caplog, harm):
    write(place / "rows.jsonl", "abc")
    read(place, monkeypatch)
    (file,) = place.glob("cache/rows/*.index")
    made = file.read_bytes()
    file.write_bytes(harm(made))
    assert [row.id for row in read(place, monkeypatch).rows] == ["a", "b", "c"]
    assert len(caplog.messages) == 1 and "made again" in caplog.text
    assert file.read_bytes() == made


def test_versions_that_share_a_folder_keep_their_indexes_while_they_use_them(place, monkeypatch, caplog):
    write(place / "rows.jsonl", "abc")
    with monkeypatch.context() as other:
        other.setattr(index, "version", lambda: "0123456789abcdef")
        read(place, monkeypatch)
    (theirs,) = place.glob("cache/rows/*.index")
    made = theirs.stat().st_mtime_ns
    for _ in range(2):
        read(place, monkeypatch)
        with monkeypatch.context() as other:
            other.setattr(index, "version", lambda: "0123456789abcdef")
            read(place, monkeypatch)
    (ours,) = set(place.glob("cache/rows/*.index")) - {theirs}
    assert theirs.stat().st_mtime_ns == made and caplog.messages == []
    for file in (ours, theirs):
        os.utime(file, (0, 0))
    index._remove_unused.cache_clear()
    write(place / "rows.jsonl", "xyz")
    read(place, monkeypatch)
    assert list(place.glob("cache/rows/*.index")) == [ours]


def test_a_picture_that_came_back_makes_its_row_usable_again(place, monkeypatch):
    ask = {"boxes": [[0.1, 0.1, 0.5, 0.5]], "messages": [{"role": "user", "content": "<image>What is at <bbox>?"}]}
    rows = [{"id": id, "images": [f"{id}.png"], **ask} for id in "cd"]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Image.new("RGB", (16, 16)).save(place / "d.png")
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    data = config(place, place / "rows.jsonl", boxes="unit", prompt=None)
    before = read_rows(data.train, data, "grpo")
    assert [row.id for row in before.rows] == ["d"] and before.identity()
    Image.new("RGB", (16, 16)).save(place / "c.png")
    table = read_rows(data.train, data, "grpo")
    assert table.identity()["sha256"] != before.identity()["sha256"]
    assert [row.id for row in table.rows] == ["c", "d"]
    (place / "d.png").unlink()
    with pytest.raises(UnusableRow):
        table.rows[1]


def test_a_file_that_changes_while_it_is_used_ends_the_run(place, monkeypatch):
    write(place / "rows.jsonl", "abc")
    table = read(place, monkeypatch)
    assert copy.deepcopy(table.rows[:2])[1].id == "b"  # reduced as for loader workers that are not forked
    with (place / "rows.jsonl").open("a") as stream:
        stream.write("\n")
    with pytest.raises(DataError, match="has changed"):
        table.rows[0]


def test_a_cache_that_cannot_be_written_is_told_and_the_rows_are_held_in_memory(place, monkeypatch, caplog):
    write(place / "rows.jsonl", "abc")
    (place / "cache").write_text("a file")
    assert len(read(place, monkeypatch).rows) == 3
    assert len(caplog.messages) == 1 and "data.cache" in caplog.text


def test_a_user_without_a_home_has_indexes_beside_temporary_files(monkeypatch):
    def nobody(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert cache_folder(None) == Path(tempfile.gettempdir()) / f"tiercel-{os.getuid()}" / "tiercel" / "rows"


CHILD = """
import sys
from tiercel.config.data import Data
from tiercel.data import index_sources, reading
reading.MOST_HELD_BYTES, index_sources._CHUNK = 0, 1 << 12
data = Data(train=sys.argv[1], cache=sys.argv[2])
print("reading", flush=True)
print(len(reading.read_rows(data.train, data, "grpo").rows), flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_nothing_half_and_the_next_one_takes_over(place):
    write(place / "rows.jsonl", map(str, range(30_000)))
    command = [sys.executable, "-c", CHILD, str(place / "rows.jsonl"), str(place / "cache")]
    root = Path(reading.__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as child:
        assert child.stdout.readline() == "reading\n"
        until = time.monotonic() + 60
        while not any(file.stat().st_size for file in place.glob("cache/rows/*.tmp")):
            assert time.monotonic() < until
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    assert list(place.glob("cache/rows/*.tmp")) and not list(place.glob("cache/rows/*.index"))
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=120)
    assert done.stdout == "reading\n30000\n" and not list(place.glob("cache/rows/*.tmp"))


def test_a_second_start_reads_no_row_for_the_format(place, monkeypatch):
    file = place / "rows.jsonl"
    file.write_text("\n".join(random_lines(random.Random(1), 100)))
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    data, read = config(place, file), []
    first = read_rows(file, data, "grpo")
    records = row_files.records_of
    monkeypatch.setattr(row_files, "records_of", lambda source, pictures: read.append(source.path) or records(source))
    assert read_rows(file, data, "grpo").identity() == first.identity() and read == []
    os.utime(file, (1, 1))
    assert read_rows(file, data, "grpo").format == first.format and read == [str(file)]


def test_a_second_start_neither_chooses_rows_nor_reads_any_for_their_identity(place, monkeypatch):
    file = place / "rows.jsonl"
    file.write_text("\n".join(random_lines(random.Random(2), 100)))
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    data = config(place, f"{file}#50", eval=HeldOut(count=7))
    first = [table.identity() for table in read_run_rows(data, "grpo").tables]
    looked, chose = [], []
    monkeypatch.setattr(FileStore, "look", lambda store, number: looked.append(number))
    monkeypatch.setattr(reading, "chosen", lambda *given: chose.append(given))
    assert [table.identity() for table in read_run_rows(data, "grpo").tables] == first
    assert looked == chose == []


def test_the_command_makes_the_index_and_says_where_it_lies(place, monkeypatch, capsys):
    rows = [{"id": f"r{number}", "messages": [{"role": "user", "content": "?"}]} for number in range(9)]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[0]])))
    (place / "few.jsonl").write_text(json.dumps(rows[0]))
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text("{}")
    recipe = {"model": {"path": str(place / "model")}, "train": {"steps": 1}, "rewards": [{"name": "exact"}]}
    data = {"train": str(place / "rows.jsonl"), "cache": str(place / "cache"), "max_bad_fraction": 0.1}
    (place / "recipe.yaml").write_text(json.dumps({**recipe, "data": data, "output": str(place / "run")}))
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 200)
    words = ["data", "index", str(place / "recipe.yaml"), f"data.eval={place / 'few.jsonl'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    (file,) = (place / "cache" / "rows").glob("*.index")
    assert "data.train: 10 rows, 9 usable, 1 rejected" in said and f"{file.stat().st_size:,} bytes, in {file}" in said
    assert "data.eval: 1 row, 1 usable, 0 rejected; no index: 1 file held in memory" in said
    assert list((place / "cache" / "rows").glob("*.json"))  # what the run would find out about its rows
    assert main([*words, "data.max_bad_fraction=0"]) == 2
