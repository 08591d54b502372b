"""Rows held out of the training rows, and N rows of a file: which ones they are, and what cannot be chosen."""

import json
import random
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image

from tiercel.config.data import Data, HeldOut, MixedFile
from tiercel.data.order import chosen
from tiercel.data.reading import read_heldout_rows, read_rows, read_run_rows, read_training_rows
from tiercel.errors import DataError


def write(path, ids, prompt="?"):
    rows = [{"id": id, "messages": [{"role": "user", "content": prompt}]} for id in ids]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def ids(table):
    return [row.id for row in table.rows]


def smallest(names, count, use):
    return sorted(names, key=lambda name: sha256(f"{use}\n{name}".encode()).digest())[:count]


NAMES = [f"row-{number}" for number in range(40)]


@pytest.mark.parametrize("held", [HeldOut(count=4), HeldOut(fraction=0.1), HeldOut(fraction=0.111)])
def test_the_rows_of_smallest_hash_are_held_out_and_never_trained_on(tmp_path, held):
    config = Data(train=write(tmp_path / "a.jsonl", NAMES), eval=held)
    rows = read_run_rows(config, "grpo")
    assert sorted(ids(rows.heldout)) == sorted(smallest(NAMES, 4, "held out"))
    assert ids(rows.train) == [name for name in NAMES if name not in ids(rows.heldout)]
    assert (rows.train.counts, rows.train.total, rows.heldout.total) == ((36,), 36, 4)
    assert read_training_rows(config, "grpo") == rows.train
    assert read_heldout_rows(config, "grpo") == rows.heldout
    assert len(rows.every) == 40


def test_the_choice_does_not_depend_on_the_order_of_files_or_on_other_rows(tmp_path):
    one, two = write(tmp_path / "a.jsonl", NAMES[:25]), write(tmp_path / "b.jsonl", NAMES[25:])
    there = read_run_rows(Data(train=one, mix=(MixedFile(path=two),), eval=HeldOut(count=7)), "grpo")
    back = read_run_rows(Data(train=two, mix=(MixedFile(path=one),), eval=HeldOut(count=7)), "grpo")
    turned = read_run_rows(Data(train=write(tmp_path / "c.jsonl", NAMES[::-1]), eval=HeldOut(count=7)), "grpo")
    assert set(ids(there.heldout)) == set(ids(back.heldout)) == set(ids(turned.heldout))
    assert there.train.counts == back.train.counts[::-1]
    assert sum(there.train.counts) == 33
    assert there.train.order(0, Data(train=two)).row_count == 33


def test_rows_of_equal_id_in_two_files_are_on_one_side_where_the_count_lets_them(tmp_path):
    one, two = write(tmp_path / "a.jsonl", NAMES), write(tmp_path / "b.jsonl", NAMES, prompt="!")
    rows = read_run_rows(Data(train=one, mix=(MixedFile(path=two),), eval=HeldOut(count=6)), "grpo")
    assert sorted(ids(rows.heldout)) == sorted(2 * smallest(NAMES, 3, "held out"))
    odd = read_run_rows(Data(train=two, mix=(MixedFile(path=one),), eval=HeldOut(count=7)), "grpo")
    last = smallest(NAMES, 4, "held out")[-1]
    assert [(row.id, row.file) for row in odd.heldout.rows if row.id == last] == [(last, one)]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (
            HeldOut(fraction=0.01),
            r"data\.eval: fraction 0\.01 of 40 usable .* is 0 rows; use \{count: 1\}",
        ),
        (HeldOut(fraction=0.99), r"fraction 0.99 holds out every usable row of .*a.jsonl \(40\)"),
        (HeldOut(count=40), "count 40 holds out every"),
        (HeldOut(count=50), "count 50 holds out every"),
    ],
)
def test_neither_side_may_be_empty(tmp_path, held, says):
    with pytest.raises(DataError, match=says):
        read_run_rows(Data(train=write(tmp_path / "a.jsonl", NAMES), eval=held), "grpo")


def test_no_file_may_be_held_out_whole(tmp_path):
    only = smallest(NAMES, 1, "held out")
    others = write(tmp_path / "a.jsonl", [name for name in NAMES if name not in only])
    config = Data(train=others, mix=(MixedFile(path=write(tmp_path / "b.jsonl", only)),), eval=HeldOut(count=3))
    with pytest.raises(DataError, match=r"holds out every usable row of .*b\.jsonl \(1\), .*; hold out fewer"):
        read_run_rows(config, "grpo")


def test_rejected_rows_are_never_held_out(tmp_path):
    file = tmp_path / "a.jsonl"
    write(file, NAMES)
    file.write_text(file.read_text() + "broken\n")
    rows = read_run_rows(Data(train=str(file), eval=HeldOut(fraction=0.25)), "grpo")
    assert (len(rows.heldout.rows), rows.heldout.rejected) == (10, ())
    assert (len(rows.train.rows), len(rows.train.rejected), rows.train.total) == (30, 1, 31)


def test_another_split_is_another_identity(tmp_path):
    file = write(tmp_path / "a.jsonl", NAMES)
    parts = [read_run_rows(Data(train=file, eval=eval), "grpo").train for eval in (None, HeldOut(count=4))]
    assert parts[0].identity() != parts[1].identity()


def test_a_file_of_held_out_rows_stays_one(tmp_path):
    config = Data(train=write(tmp_path / "a.jsonl", NAMES), eval=write(tmp_path / "b.jsonl", ["x", "y"]))
    rows = read_run_rows(config, "grpo")
    assert (len(rows.train.rows), ids(rows.heldout)) == (40, ["x", "y"])
    assert read_run_rows(config.model_copy(update={"eval": None}), "grpo").heldout is None


def test_n_rows_of_a_file_in_its_order(tmp_path):
    file = write(tmp_path / "a.jsonl", NAMES)
    table = read_rows(f"{file}#5", Data(train="-"), "grpo")
    expected = smallest(NAMES, 5, "part of a file")
    assert ids(table) == [name for name in NAMES if name in expected]
    assert (table.total, table.counts, {row.file for row in table.rows}) == (5, (5,), {file})
    assert ids(read_rows(f"{file}#40", Data(train="-"), "grpo")) == NAMES
    assert set(expected) != set(smallest(NAMES, 5, "held out"))


def test_more_rows_than_there_are(tmp_path):
    file = write(tmp_path / "a.jsonl", NAMES)
    with pytest.raises(DataError, match=r"a\.jsonl#41: the file has only 40 rows"):
        read_rows(f"{file}#41", Data(train="-"), "grpo")


def test_a_part_has_its_share_of_rejected_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    broken = "".join(f'{{"id": "bad-{number}", "messages": 7}}\n' for number in range(40))
    file.write_text((tmp_path / write(file, NAMES)).read_text() + broken)
    table = read_rows(f"{file}#20", Data(train="-"), "grpo")
    assert len(table.rows) + len(table.rejected) == table.total == 20
    assert 4 <= len(table.rejected) <= 16


def test_training_and_held_out_parts_go_by_the_same_names(tmp_path):
    file = write(tmp_path / "a.jsonl", NAMES)
    config = Data(train=f"{file}#30", mix=(MixedFile(path=f"{file}#10", weight=2.0),), eval=HeldOut(count=4))
    rows = read_run_rows(config, "grpo")
    assert (sum(rows.train.counts), len(rows.heldout.rows)) == (36, 4)


def test_the_choice_needs_no_file_and_no_seed():
    assert chosen(np.empty(0), np.empty(0), (), 3, "held out").tolist() == []


def test_rows_of_one_record_are_on_one_side(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    box = {"image": "a.png", "bbox": [1, 1, 2, 2]}
    records = [{**box, "id": name, "sentences": ["left", "right", "middle"]} for name in NAMES]
    file = tmp_path / "boxes.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Data(train=str(file), prompt="Where is {prompt}?", eval=HeldOut(count=9))
    rows = read_run_rows(config, "grpo")
    assert len(rows.heldout.rows) == 9
    assert {row.line for row in rows.heldout.rows}.isdisjoint(row.line for row in rows.train.rows)


@pytest.mark.parametrize("seed", range(20))
def test_chosen_rows_are_those_of_a_plain_sort_of_their_hashes(seed):
    draw = random.Random(seed)
    for _ in range(50):
        count = draw.randrange(40)
        files = [draw.randrange(3) for _ in range(count)]
        lines = list(range(1, count + 1)) if seed % 2 else [draw.randrange(1, 20) for _ in range(count)]
        ids = [str(draw.randrange(30)) for _ in range(count)]
        wanted = draw.randrange(45)
        of_record: dict[tuple[int, int], str] = {}  # rows of one record are chosen by the id of its first row
        for record, id in zip(zip(files, lines, strict=True), ids, strict=True):
            of_record.setdefault(record, id)

        def key(number, files=files, lines=lines, of_record=of_record):
            record = files[number], lines[number]
            return sha256(f"held out\n{of_record[record]}".encode()).digest()[:16], *record, number

        found = chosen(np.array(files, np.uint16), np.array(lines, np.uint32), iter(ids), wanted, "held out")
        assert found.tolist() == sorted(sorted(range(count), key=key)[:wanted])
