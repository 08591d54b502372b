"""Tables are indexed without the bytes of their pictures if every picture has some, and the index is as with them."""

import io
import random

import pytest

from tests.data.test_index import both, config
from tests.data.test_index_of_groups import picture, rows_of_pictures, write_arrow, write_parquet
from tiercel.data import index_sources, reading
from tiercel.data.reading import read_rows
from tiercel.data.stores import COLUMNS, UnusableRow

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from tiercel.data.picture_columns import (  # noqa: E402
    UNREAD,
    batch_without_bytes,
    leaves_without_bytes,
    with_unread,
)

PICTURE = {"bytes": b"PNG", "path": "a.png"}
ROWS = [
    {"images": [PICTURE, None, PICTURE], "image": PICTURE, "audio": PICTURE},
    {"images": [], "image": None, "audio": PICTURE},
    {"images": None, "image": PICTURE, "audio": PICTURE},
]
NAMES = ("images", "image", "rejected_images")


def opened(rows):
    """The rows as a Parquet file and as an Arrow batch."""
    stream, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, stream)
    return parquet.ParquetFile(stream), table.to_batches()[0]


def test_bytes_are_left_out_of_the_named_columns_if_each_picture_has_them():
    table, batch = opened(ROWS)
    leaves, left_out = leaves_without_bytes(table, 0, NAMES)
    assert leaves == ["images.list.element.path", "image.path", "audio.bytes", "audio.path"]
    assert left_out == ["images", "image"]
    less, of_batch = batch_without_bytes(batch, NAMES)
    assert of_batch == left_out and less.schema.names == batch.schema.names
    (read,) = table.iter_batches(columns=leaves)
    assert read.to_pylist() == less.to_pylist()
    unread = {"bytes": UNREAD, "path": "a.png"}
    assert with_unread(less.to_pylist()[0], left_out) == {
        "images": [unread, None, unread],
        "image": unread,
        "audio": PICTURE,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("images", [PICTURE, {"bytes": None, "path": "b.png"}]),  # a picture in a file
        ("image", {"bytes": None, "path": "b.png"}),
        ("image", {"bytes": "iVBORw0KGgo", "path": "b.png"}),  # text
        ("image", {"bytes": b"PNG"}),
        ("image", {"bytes": b"PNG", "path": "b.png", "size": 3}),
        ("image", [[PICTURE]]),
    ],
)
def test_a_column_that_may_have_pictures_without_bytes_is_read_as_a_whole(name, value):
    rows = [{**row, name: value} if row is ROWS[0] or name == "image" else row for row in ROWS]
    table, batch = opened(rows)
    assert leaves_without_bytes(table, 0, [name]) == (None, [])
    assert batch_without_bytes(batch, [name]) == (batch, [])


def test_without_counts_of_nulls_a_column_is_read_as_a_whole():
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), stream, write_statistics=False)
    assert leaves_without_bytes(parquet.ParquetFile(stream), 0, NAMES) == (None, [])


def test_columns_whose_names_could_mean_the_same_leaves_are_read_as_a_whole():
    table, batch = opened([{"image": PICTURE, "image.bytes": b"more"}])
    assert leaves_without_bytes(table, 0, NAMES) == (None, [])
    assert batch_without_bytes(batch, NAMES) == (batch, [])


def random_table(draw, count):
    """Rows whose pictures stand in one column or in a list, most with their bytes in the row, and some of which cannot
    be used."""
    pictures, name = [picture(draw) for _ in range(5)], draw.choice(["image", "images", "photo"])
    without = draw.random() < 0.3  # pictures that stand in files
    rows = []
    for number in range(count):
        data = None if without and draw.random() < 0.2 else draw.choice(pictures)
        image = {"bytes": data, "path": "a.png" if data is None else draw.choice(["a.png", None])}
        marks = draw.choice(["<image>"] * 9 + ["", "<image><image>"])
        role = draw.choice(["user"] * 9 + ["nobody"])
        row = {"messages": [{"role": role, "content": f"{marks}?"}, {"role": "assistant", "content": str(number)}]}
        row["id"] = f"row-{draw.randrange(3 * count)}"
        row[name] = (image if name == "image" else [image] * marks.count("<image>")) if marks else None
        row["sound"] = {"bytes": b"la", "path": "a.wav"}
        rows.append(row)
    return pyarrow.Table.from_pylist(rows), name


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_is_as_with_the_bytes(tmp_path, monkeypatch, seed, write):
    draw = random.Random(seed)
    table, name = random_table(draw, draw.randint(30, 90))
    write(tmp_path / "rows", [table], draw)
    columns = {"images": "photo"} if name == "photo" else {}
    data = config(tmp_path, tmp_path / "rows", prompt=None, columns=columns)
    held, found = both(monkeypatch, data, "sft")
    _, grouped = both(monkeypatch, data.model_copy(update={"group_by_prefix": True}), "sft")
    assert held.train.rejected == found.train.rejected == grouped.train.rejected
    assert list(held.train.rows) == list(found.train.rows) and held.train.identity() == found.train.identity()
    for name in set(COLUMNS) - {"beginning"}:
        assert (held.train.rows.column(name) == found.train.rows.column(name)).all()
    assert (held.train.rows.column("beginning") == grouped.train.rows.column("beginning")).all()
    with pytest.raises(AssertionError):
        found.train.rows.column("beginning")


def rows_of_boxes(file, count, group):
    draw = random.Random(0)
    rows = [
        {
            "id": str(number),
            "messages": [
                {"role": "user", "content": "<image>where?"},
                {"role": "assistant", "content": "<bbox>"},
            ],
            "images": [{"bytes": picture(draw), "path": None}],
            "objects": {"bbox": [[number % 5 / 10, 0.2, 0.9, 0.6 + number % 4 / 10]], "bbox_type": "norm1"},
        }
        for number in range(count)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=group, use_dictionary=False)


def test_pictures_are_read_if_boxes_are_in_units_of_their_sizes(tmp_path, monkeypatch):
    rows_of_boxes(tmp_path / "rows.parquet", 30, 10)
    held, found = both(monkeypatch, config(tmp_path, tmp_path / "rows.parquet", prompt=None), "sft")
    assert list(held.train.rows) == list(found.train.rows) and held.train.identity() == found.train.identity()
    assert held.train.rejected == found.train.rejected and held.train.rows[0].boxes


def test_pictures_that_cannot_be_read_are_found_when_their_rows_are_asked_for(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    rows_of_pictures(file, 30, 10, "zstd")
    described = parquet.read_metadata(file).row_group(1)
    leaves = [described.column(number) for number in range(described.num_columns)]
    column = next(leaf for leaf in leaves if leaf.path_in_schema.endswith("images.list.element.bytes"))
    data = bytearray(file.read_bytes())
    end = column.data_page_offset + column.total_compressed_size
    data[column.data_page_offset : end] = bytes(column.total_compressed_size)
    file.write_bytes(data)
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    monkeypatch.setattr(index_sources._BATCHES, "kept", [])
    rows = read_rows(file, config(tmp_path, file, prompt=None), "sft").rows
    lines = rows.column("line").tolist()
    unusable = []
    for number, line in enumerate(lines):
        try:
            assert rows[number].line == line
        except UnusableRow as error:
            unusable.append(line)
            assert "row group 1" in str(error)
    assert unusable == [line for line in lines if 11 <= line <= 20]
