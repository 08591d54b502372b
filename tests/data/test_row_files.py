"""Indexes of many small files are made several at once, and are those that one process makes."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tiercel.config.data import Data
from tiercel.config.row_sources import RowSource
from tiercel.data import index, reading, row_files
from tiercel.data.reading import read_rows
from tiercel.errors import DataError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with twelve files of rows, all of which are indexed."""
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    for number in range(12):
        write(tmp_path, number, 20)
    return tmp_path


def write(place, number, rows):
    lines = ({"prompt": f"{number} {row}?", "answer": str(row)} for row in range(rows))
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{broken\n"
    (place / f"rows-{number:02d}.jsonl").write_text(text)


def table_of(place, cache="cache"):
    data = Data(train=f"{place}/rows-*.jsonl", cache=str(place / cache))
    return read_rows(data.train, data, "grpo")


def facts(table):
    rows = [(row.id, row.file, row.line, row.messages) for row in table.rows]
    return rows, table.rejected, table.counts, table.identity()


def makers(monkeypatch):
    """The processes that make indexes, in a file because they are others than this one."""
    made = []
    spread = row_files.spread

    def counted(work, tasks):
        made.append(len(tasks))
        return spread(work, tasks)

    monkeypatch.setattr(row_files, "spread", counted)
    return made


def test_rows_are_those_of_indexes_made_one_after_the_other(place, monkeypatch):
    made = makers(monkeypatch)
    at_once = facts(table_of(place))
    monkeypatch.setattr(row_files, "MANY_FILES", 1000)
    one_by_one = facts(table_of(place, "other"))
    assert at_once == one_by_one and len(at_once[0]) == 240 and len(at_once[1]) == 12
    assert made == [12]


def test_a_second_start_makes_none_and_new_files_are_made_at_once(place, monkeypatch):
    first = facts(table_of(place))
    made = makers(monkeypatch)
    assert facts(table_of(place)) == first and made == []
    write(place, 12, 20)
    assert len(table_of(place).rows) == 260 and made == [13]


def test_a_changed_file_in_the_middle_is_made_again(place, monkeypatch, caplog):
    table_of(place)
    made = makers(monkeypatch)
    write(place, 5, 30)
    assert len(table_of(place).rows) == 250 and made == []
    assert "rows-05.jsonl" in caplog.text


def test_large_files_are_each_shared_by_all_processes(place, monkeypatch):
    made = makers(monkeypatch)
    monkeypatch.setattr(row_files, "LARGEST_SMALL_FILE", 100)
    assert len(table_of(place).rows) == 240 and made == []


def tables(place, count):
    """Parquet files of 20 rows each, with their pictures."""
    pytest.importorskip("pyarrow")
    from tests.data.test_index_of_groups import rows_of_pictures

    place.mkdir()
    for number in range(count):
        rows_of_pictures(place / f"rows-{number:02d}.parquet", 20, 7)
    return place


@pytest.mark.parametrize(("grouped", "rows", "expected"), [(False, 20, [9]), (True, 20, []), (False, 19, [])])
def test_large_tables_of_few_rows_are_indexed_at_once_if_their_pictures_are_not_read(
    tmp_path, monkeypatch, grouped, rows, expected
):
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    monkeypatch.setattr(row_files, "LARGEST_SMALL_FILE", 100)
    monkeypatch.setattr(row_files, "_FEW_ROWS", rows)
    made = makers(monkeypatch)
    files = str(tables(tmp_path / "tables", 9) / "rows-*.parquet")
    data = Data(train=files, cache=str(tmp_path / "cache"), ids="line", group_by_prefix=grouped)
    assert len(read_rows(data.train, data, "sft").rows) == 180 and made == expected


def test_a_table_that_is_none_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    monkeypatch.setattr(row_files, "LARGEST_SMALL_FILE", 100)
    place = tables(tmp_path / "tables", 9)
    (place / "rows-04.parquet").write_bytes(bytes(1000))
    data = Data(train=f"{place}/rows-*.parquet", cache=str(tmp_path / "cache"), ids="line")
    with pytest.raises(DataError, match=r"rows-04.*Parquet"):
        read_rows(data.train, data, "sft")


@pytest.mark.parametrize(("more", "expected"), [(0, [12]), (1, [])])
def test_files_that_one_process_would_read_for_long_without_a_beat_are_shared(tmp_path, monkeypatch, more, expected):
    files = [RowSource(path=str(tmp_path / f"{number}.jsonl")) for number in range(12)]
    for file in files:
        with open(file.path, "wb") as stream:
            stream.truncate((64 << 20) + more)
    made = []
    monkeypatch.setattr(row_files, "has_index", lambda what, cache: False)
    monkeypatch.setattr(row_files, "spread", lambda work, tasks: made.append(len(tasks)) or [])
    row_files.make_indexes(files, lambda file: SimpleNamespace(indexed=file), "rows", Data(train="rows"), lambda: None)
    assert made == expected


def test_a_file_without_a_usable_row_is_named(place):
    write(place, 7, 0)
    with pytest.raises(DataError, match="rows-07"):
        table_of(place)


MAKES = """
import sys, time
from pathlib import Path
from tiercel.data import index, reading
from tests.data.test_row_files import table_of
reading.MOST_HELD_BYTES, rows_of = 0, index._part
index._part = lambda source, part: (time.sleep(0.3), rows_of(source, part))[1]
table_of(Path(sys.argv[1]))
"""


def test_a_start_that_was_killed_is_finished_by_the_next(place, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", MAKES, str(place)], start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len([*(place / "cache").glob("rows/*.index")]) < 3 and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    there = len([*(place / "cache").glob("rows/*.index")])
    assert 3 <= there < 12
    made = makers(monkeypatch)
    assert facts(table_of(place)) == facts(table_of(place, "other")) and made == [12, 12]
    assert not [*(place / "cache").glob("rows/*.tmp")]


def test_a_cache_that_cannot_be_written_holds_rows_in_memory(place, caplog):
    (place / "cache").write_text("a file")
    assert len(table_of(place).rows) == 240
    assert caplog.text.count("data.cache") == 12


def test_indexes_of_another_version_are_made_at_once(place, monkeypatch):
    table_of(place)
    made = makers(monkeypatch)
    monkeypatch.setattr(index, "version", lambda: "another")
    assert len(table_of(place).rows) == 240 and made == [12]
