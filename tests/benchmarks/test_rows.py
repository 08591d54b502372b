"""The benchmark of many rows writes each figure when it is there, and makes files that can be read."""

import json

from benchmarks.made_rows import write_lines, write_parquet, write_shards
from benchmarks.rows import PARTS, _write, table
from tiercel.config.data import Data
from tiercel.data.reading import read_run_rows

MACHINE = {"cores": 2}


def found(rows, **ways):
    of = {"machine": MACHINE, "rows": rows, "files": 1, "bytes": 5_000_000, "wanted": rows, "index_bytes": 61 * rows}
    return {**of, "ways": {way: {**figures, "load": 1.0} for way, figures in ways.items()}}


def test_figures_of_the_same_rows_come_together_and_other_parts_stay(tmp_path):
    out = tmp_path / "rows.json"
    _write(out, "tar", found(7, first={"rows": 7, "seconds": 2.0}))
    _write(out, "jsonl", found(9, first={"rows": 9, "seconds": 3.0}))
    _write(out, "jsonl", found(9, check={"seconds": 4.0}))
    every = json.loads(out.read_text())
    assert set(every) == {"tar", "jsonl"} and set(every["jsonl"]["ways"]) == {"first", "check"}
    _write(out, "jsonl", found(8, second={"rows": 8, "seconds": 1.0}))
    every = json.loads(out.read_text())
    assert set(every["jsonl"]["ways"]) == {"second"} and every["tar"]["rows"] == 7
    assert out.with_suffix(".md").read_text() == table(every)


def test_what_was_left_out_is_said():
    few = {**found(10, memory={"left_out": "too large"}, datasets_first={"rows": 4, "own_MB": 5}), "wanted": 20}
    text = table({"parquet": few})
    assert "10 rows in 1 file, 5 MB (the disk had no room for 20 rows); the index has 61 bytes a row" in text
    assert "| rows held in memory: too large |" in text
    assert "first load, 4 of the rows, for which there was room |  |  |  | 5 MB |" in text


def test_the_files_have_rows_of_ids_of_their_own(tmp_path):
    for name, write, count in (("jsonl", write_lines, 5), ("tar", write_shards, 103), ("parquet", write_parquet, 103)):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, count)
        data = Data(train=str(folder / PARTS[name].pattern), cache=str(tmp_path / "cache"))
        rows = read_run_rows(data, "sft").train
        assert len(rows.rows) == len(set(rows.rows.ids())) == count and not rows.rejected
