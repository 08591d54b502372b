"""The index of Parquet and Arrow files gives the same rows, pictures, orders and rejections as rows in memory, and few
of them are held."""

import copy
import io
import random
from functools import partial

import pytest
from PIL import Image

from tests.data.test_index import both, config
from tiercel.config.data import HeldOut
from tiercel.data import index_sources, reading
from tiercel.data.reading import read_rows
from tiercel.data.stores import UnusableRow
from tiercel.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402


def picture(draw):
    stream = io.BytesIO()
    Image.frombytes("RGB", (8, 8), draw.randbytes(192)).save(stream, "PNG")
    return stream.getvalue()


def random_table(draw, count):
    """Rows with embedded pictures, some broken, repeated, of text that is not UTF-8 or with a column of bytes."""
    pictures = [picture(draw) for _ in range(5)]
    rows = []
    for _ in range(count):
        marks = draw.choice(["<image>", "<image>", "<image><image>", ""])
        image = {"bytes": draw.choice(pictures), "path": draw.choice(["a.png", None])}
        id, role = f"row-{draw.randrange(3 * count)}", draw.choice(["user"] * 9 + ["nobody"])
        turns = [{"role": role, "content": marks + "?"}, {"role": "assistant", "content": "y" * draw.randrange(40)}]
        mask = b"m" if draw.random() < 0.3 else None
        rows.append({"id": id, "messages": turns, "images": [image] if marks else None, "answer": "1", "mask": mask})
    table = pyarrow.Table.from_pylist(rows)
    texts = pyarrow.array([draw.choice([b"1", "é".encode(), b"\xff" if count % 2 else b"2"]) for _ in rows])
    return table.set_column(table.column_names.index("answer"), "answer", texts.view(pyarrow.string()))


def write_parquet(folder, tables, draw):
    (folder / "data").mkdir(parents=True)
    for number, table in enumerate(tables):
        file = folder / "data" / f"train-{number}-of-{len(tables)}.parquet"
        parquet.write_table(table, file, row_group_size=draw.randint(3, 40), compression=draw.choice(["none", "zstd"]))


def write_arrow(folder, tables, draw):
    folder.mkdir()
    for number, table in enumerate(tables):
        options = pyarrow.ipc.IpcWriteOptions(compression=draw.choice([None, "zstd"]))
        with pyarrow.ipc.new_stream(folder / f"{number}.arrow", table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=draw.randint(3, 40))
    names = ", ".join(f'{{"filename": "{number}.arrow"}}' for number in range(len(tables)))
    (folder / "state.json").write_text(f'{{"_data_files": [{names}]}}')


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize("seed", range(4))
def test_rows_orders_splits_and_rejections_equal_those_in_memory(tmp_path, monkeypatch, seed, write):
    draw = random.Random(seed)
    monkeypatch.setattr("tiercel.data.arrow_files._BATCH_BYTES", 3000)
    monkeypatch.setattr(index_sources, "_KEPT_BYTES", 4000)
    folder = tmp_path / "rows"
    write(folder, [random_table(draw, draw.randint(20, 60)) for _ in range(draw.randint(1, 3))], draw)
    file = f"{folder}/data/train-0-of-*.parquet" if write is write_parquet and seed % 2 else folder
    keys = {"prompt": None, "eval": HeldOut(count=5), "group_by_prefix": True}
    data = config(tmp_path, f"{file}#17" if seed == 2 else file, **keys)
    for _ in range(2):  # the second time from the index that is there
        held, found = both(monkeypatch, data, "sft")
        for one, other in zip(held.tables, found.tables, strict=True):
            assert (one.rejected, one.counts, one.notes) == (other.rejected, other.counts, other.notes)
            assert one.identity() == other.identity() and list(one.rows) == list(other.rows)
            orders = [each.order(3, data) for each in (one, other)]
            places = [orders[0].row(index) for index in range(150)]
            assert places == [orders[1].row(index) for index in range(150)]
            assert [one.rows[place] for place in places] == [other.rows[place] for place in places]
        assert list(held.every.ids()) == list(found.every.ids()) and held.train.rejected
        assert isinstance(found.train.rows.stores[0]._source, index_sources.GroupFiles)


def rows_of_pictures(file, count, group, compression="none"):
    draw = random.Random(0)
    rows = [
        {
            "id": str(number),
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}],
            "images": [{"bytes": picture(draw), "path": None}],
        }
        for number in range(count)
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, file, row_group_size=group, compression=compression, use_dictionary=False)


def test_a_row_group_that_cannot_be_read_ends_as_bad_rows_do(tmp_path, monkeypatch, caplog):
    file = tmp_path / "rows.parquet"
    rows_of_pictures(file, 30, 10, "zstd")
    column = parquet.read_metadata(file).row_group(1).column(0)
    data = bytearray(file.read_bytes())
    data[column.data_page_offset : column.data_page_offset + column.total_compressed_size] = bytes(
        column.total_compressed_size
    )
    file.write_bytes(data)
    for _ in range(2):
        held, found = both(monkeypatch, config(tmp_path, file, prompt=None), "sft")
        assert held.train.rejected == found.train.rejected and list(held.train.rows) == list(found.train.rows)
        assert [row.line for row in found.train.rejected] == list(range(11, 21))
        assert {row.field for row in found.train.rejected} == {"row"} and "row group 1" in found.train.rejected[
            0
        ].reason
    assert caplog.messages == []  # the index is not made again


def test_a_row_group_that_is_lost_while_it_is_used_makes_its_rows_unusable(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    rows_of_pictures(file, 30, 10)
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    rows = read_rows(file, config(tmp_path, file, prompt=None), "sft").rows

    def broken(group):
        raise OSError("Corrupt snappy compressed data.")
        yield

    monkeypatch.setattr(index_sources._BATCHES, "kept", [])
    assert copy.deepcopy(rows)[12].id == rows[12].id == "12"
    monkeypatch.setattr(index_sources, "batches_of", broken)
    with pytest.raises(UnusableRow, match="row group 2"):
        rows[25]
    assert rows[12].id == "12"  # which is kept


def test_few_batches_are_kept_and_rows_in_order_read_each_group_once(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    rows_of_pictures(file, 400, 100)
    monkeypatch.setattr("tiercel.data.arrow_files._BATCH_BYTES", 2000)
    monkeypatch.setattr(index_sources, "_KEPT_BYTES", 5000)
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    rows = read_rows(file, config(tmp_path, file, prompt=None), "sft").rows
    begun, real = [], index_sources.batches_of
    monkeypatch.setattr(index_sources, "batches_of", lambda group: begun.append(group.number) or real(group))
    assert [row.id for row in rows] == list(map(str, range(400))) and begun == [0, 1, 2, 3]
    kept = index_sources._BATCHES.kept
    assert len(kept) > 1 and sum(batch.nbytes for _, _, batch in kept) <= 5000


@pytest.mark.parametrize("change", [partial(rows_of_pictures, count=21, group=7), lambda file: file.unlink()])
def test_a_file_that_changes_while_it_is_used_ends_the_run(tmp_path, monkeypatch, change):
    file = tmp_path / "rows.parquet"
    rows_of_pictures(file, 20, 10)
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 0)
    rows = read_rows(file, config(tmp_path, file, prompt=None), "sft").rows
    change(file)
    with pytest.raises(DataError, match="has changed"):
        rows[3]
