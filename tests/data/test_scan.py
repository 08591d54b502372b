"""`tiercel check` judges rows from headers and planned lengths alone."""

import json
import os
import sys

import pytest
from PIL import Image

from tiercel.config.schema import Data
from tiercel.data.reading import read_rows
from tiercel.data.scan import PlannedPrompt, Scan, decoded_size, percentiles, undecodable
from tiercel.errors import DataError


def write_rows(tmp_path, images_of_row):
    lines = [
        json.dumps({"id": f"r{number}", "messages": [{"role": "user", "content": "?"}], "images": images})
        for number, images in enumerate(images_of_row)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return file


def area(row, sizes):
    """A prompt of one token, and one for each pixel."""
    return PlannedPrompt(tokens=1 + sum(width * height for width, height in sizes))


def test_scan_counts_lengths_images_and_rejections(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    Image.new("RGB", (10, 10)).save(tmp_path / "large.png")
    Image.new("RGB", (200, 200)).save(tmp_path / "huge.png")
    (tmp_path / "bad.png").write_bytes(b"x")
    rows = [[], ["a.png"], ["a.png", "a.png"], ["large.png"], ["huge.png"], ["bad.png"], ["none.png"], ["../x.png"]]
    config = Data(train="rows.jsonl", max_prompt_tokens=100, max_image_pixels=10_000)
    file = write_rows(tmp_path, rows)
    seen = []
    scan = Scan(plan_prompt=area, config=config)
    report = scan(read_rows(file, config, "grpo"), lambda done, total: seen.append((done, total)))
    assert (report.accepted, report.image_count) == (3, 3)
    assert report.rows_by_image_count == {0: 1, 1: 1, 2: 1}
    assert report.prompt_token_percentiles == {0: 1, 50: 13, 90: 25, 99: 25, 100: 25}
    reasons = {row.id: (row.field, row.reason) for row in report.rejected}
    assert reasons.keys() == {"r3", "r4", "r5", "r6", "r7"}
    assert reasons["r3"][1].startswith("has 101 tokens, more than data.max_prompt_tokens = 100")
    assert "200 x 200 pixels" in reasons["r4"][1]
    assert "bad.png: is not a PNG, JPEG or WEBP" in reasons["r5"][1]
    assert "none.png: there is no such file" in reasons["r6"][1]
    assert reasons["r7"][0] == "images[0]"
    assert seen == [(7, 7)]


def cut_short(path, size=(40, 40)):
    """A picture whose header is whole and whose pixels are not."""
    Image.effect_noise(size, 60).save(path)
    path.write_bytes(path.read_bytes()[:-200])


def test_a_picture_that_is_cut_short_is_found_where_pixels_are_decoded(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    cut_short(tmp_path / "cut.png")
    config = Data(train="rows.jsonl")
    table = read_rows(write_rows(tmp_path, [["a.png"], ["a.png", "cut.png"], [], ["cut.png"]]), config, "grpo")
    assert Scan(plan_prompt=area, config=config)(table).rejected == []
    decoded = Scan(plan_prompt=area, config=config, measure=decoded_size)(table)
    assert [(row.id, row.field) for row in decoded.rejected] == [("r1", "images"), ("r3", "images")]
    assert (decoded.accepted, decoded.prompt_token_percentiles[100]) == (2, 13)
    assert undecodable(table.rows, config) == decoded.rejected
    assert undecodable(table.rows[:1], config) == []


def test_sizes_come_in_the_order_of_the_row(tmp_path):
    Image.new("RGB", (1, 2)).save(tmp_path / "a.png")
    Image.new("RGB", (3, 4)).save(tmp_path / "b.png")
    config = Data(train="rows.jsonl")
    seen = []

    def plan(row, sizes):
        seen.append(sizes)
        return PlannedPrompt(tokens=1)

    table = read_rows(write_rows(tmp_path, [["b.png", "a.png", "b.png"]]), config, "grpo")
    Scan(plan_prompt=plan, config=config)(table)
    assert seen == [[(3, 4), (1, 2), (3, 4)]]


def test_a_row_that_cannot_be_planned_is_rejected(tmp_path):
    def plan(row, sizes):
        raise DataError("the text contains the model's own vision token", field="messages")

    config = Data(train="rows.jsonl")
    report = Scan(plan_prompt=plan, config=config)(read_rows(write_rows(tmp_path, [[]]), config, "grpo"))
    assert (report.accepted, report.prompt_token_percentiles) == (0, {})
    assert report.rejected[0].field == "messages"


def test_processes_that_share_the_rows_find_what_one_finds(tmp_path):
    for number in range(6):
        Image.new("RGB", (number + 1, 5)).save(tmp_path / f"{number}.png")
    names = [[f"{number * 7 % 8}.png"] * (number % 3) for number in range(700)]  # 6.png and 7.png are not there
    config, processes = Data(train="rows.jsonl", max_prompt_tokens=40), set()

    def plan(row, sizes):
        processes.add(os.getpid())
        notes = ("its number ends with 7",) if row.id.endswith("7") else ()
        return PlannedPrompt(tokens=area(row, sizes).tokens, notes=notes)

    table = read_rows(write_rows(tmp_path, names), config, "grpo")
    seen = []
    alone = Scan(plan_prompt=plan, config=config, is_shared=False)(table)
    assert processes == {os.getpid()}
    processes.clear()
    shared = Scan(plan_prompt=plan, config=config)(table, lambda done, total: seen.append((done, total)))
    assert shared == alone
    assert 0 < alone.accepted < 700
    assert 0 < alone.notes["its number ends with 7"] < 70
    assert seen == [(256, 700), (512, 700), (700, 700)]
    if sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
        assert not processes


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(1, 101), {0: 1, 50: 50, 90: 90, 99: 99, 100: 100}),
        (range(1, 4), {0: 1, 50: 2, 90: 3, 99: 3, 100: 3}),
        ([5], {0: 5, 50: 5, 90: 5, 99: 5, 100: 5}),
        ([], {}),
    ],
)
def test_percentiles_by_nearest_rank(values, expected):
    assert percentiles({value: 1 for value in values}) == expected


def test_columns_that_rows_leave_out_are_counted_while_they_are_scanned(tmp_path):
    import pyarrow
    import pyarrow.parquet

    turns = [{"role": "user", "content": "?"}]
    rows = [{"messages": turns, "mask": b"x", "kind": "a"} for _ in range(300)]
    rows += [{"messages": turns, "mask": None, "kind": "b"} for _ in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = Data(train="rows.parquet")
    table = read_rows(tmp_path / "rows.parquet", config, "grpo")
    assert Scan(plan_prompt=area, config=config)(table).left_out == {("mask", "bytes"): 300}
