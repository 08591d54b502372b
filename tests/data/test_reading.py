"""Row files: JSON Lines, JSON lists and Parquet, and the record of what was rejected."""

import builtins
import gzip
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from tiercel.config.row_sources import RowSource
from tiercel.config.schema import Data
from tiercel.data import readers
from tiercel.data.media.images import decode
from tiercel.data.reading import read_rows, read_run_rows, read_training_rows
from tiercel.data.rejected_rows import require_few_bad, write_bad_rows, write_fix_report
from tiercel.data.row_files import image_roots_of
from tiercel.errors import DataError, EnvironmentProblem, RunError
from tiercel.types import ImageRoots, RejectedRow


def line(id=None, **more):
    return json.dumps({"id": id, "messages": [{"role": "user", "content": "?"}], **more})


def config(**keys):
    return Data(train="rows.jsonl", **keys)


def read(path, **keys):
    return read_rows(path, config(**keys), "grpo")


def test_json_lines_in_order_with_blank_lines_and_byte_order_mark(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + f"{line('a')}\r\n\n  \n{line()}\n{line('c')}".encode())
    table = read(file)
    assert [(row.id, row.line) for row in table.rows] == [("a", 1), ("rows:4", 4), ("c", 5)]
    assert (table.total, table.rejected, table.format, table.file) == (3, (), "tiercel", str(file))


def test_one_file_of_a_pattern_may_have_no_row_that_can_be_used(tmp_path):
    """Writers in parallel leave empty files; what is wrong elsewhere is counted over all files."""
    for name, text in (
        ("part-0", f"{line('a')}\n{line('b')}"),
        ("part-1", ""),
        ("part-2", '{"messages": [], "id": "c"}'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(text)
    table = read(str(tmp_path / "part-*.jsonl"))
    assert [row.id for row in table.rows] == ["a", "b"] and table.total == 3
    assert [Path(row.file).name for row in table.rejected] == ["part-2.jsonl"]
    (tmp_path / "part-0.jsonl").write_text("")
    with pytest.raises(DataError, match=r"none of its rows \(1\) can be used"):
        read(str(tmp_path / "part-*.jsonl"))
    (tmp_path / "part-2.jsonl").write_text("")
    with pytest.raises(DataError, match="the file has no rows"):
        read(str(tmp_path / "part-*.jsonl"))


def test_one_shard_of_a_pattern_may_have_no_known_layout(tmp_path):
    for name, text in (("part-0", '{"foo": 1}'), ("part-1", f"{line('a')}\n{line('b')}")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    table = read(str(tmp_path / "part-*.jsonl"))
    assert [row.id for row in table.rows] == ["a", "b"]
    assert [Path(row.file).name for row in table.rejected] == ["part-0.jsonl"]
    (tmp_path / "part-1.jsonl").unlink()
    with pytest.raises(DataError) as refused:
        read(str(tmp_path / "part-*.jsonl"))
    assert refused.value.field == "format"


@pytest.mark.parametrize(
    "odd", ('{"score": NaN}', '{"id": "odd", "id": "odd"}', '{"id": "a\tb"}', f'{{"id": {"7" * 5000}}}')
)
def test_one_value_of_a_json_list_is_rejected_alone(tmp_path, odd):
    """Python writes NaN by default."""
    (tmp_path / "rows.json").write_text(f"[\n{line('a')} ,\n{odd}, {line('b')}\n]\n")
    table = read(tmp_path / "rows.json")
    assert [row.id for row in table.rows] == ["a", "b"] and [row.line for row in table.rejected] == [2]
    (tmp_path / "rows.json").write_text(f"[{line('a')}, {odd}")
    with pytest.raises(DataError) as problem:
        read(tmp_path / "rows.json")
    assert "name it .jsonl" not in str(problem.value)


def test_a_row_whose_parts_python_printed_is_rejected_alone(tmp_path):
    odd = {"messages": [{"role": "user", "content": "[{'type': 'text', 'text': 'hi'}]"}], "id": "odd"}
    (tmp_path / "rows.jsonl").write_text(f"{line('a')}\n{json.dumps(odd)}\n{line('b')}")
    table = read(tmp_path / "rows.jsonl")
    assert [row.id for row in table.rows] == ["a", "b"] and [row.id for row in table.rejected] == ["odd"]


@pytest.mark.parametrize("wrong", ({"id": ["y" * 3000]}, {"answer_image": 10**3000}, {"messages": [{"y" * 3000: 1}]}))
def test_a_reason_shows_only_the_beginning_of_a_long_value(tmp_path, wrong):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([line("a"), json.dumps({**json.loads(line("b")), **wrong})]))
    (rejected,) = read(file, format="tiercel").rejected
    assert len(rejected.reason) < 300


def test_a_pattern_names_several_files(tmp_path):
    for name, ids in (("part-1", "cd"), ("part-0", "ab"), ("other", "x")):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(line, ids)))
    table = read(str(tmp_path / "part-*.jsonl"))
    assert [row.id for row in table.rows] == ["a", "b", "c", "d"] and table.counts == (4,)
    assert [(Path(row.file).name, row.line) for row in table.rows][1:3] == [("part-0.jsonl", 2), ("part-1.jsonl", 1)]
    assert len(read(str(tmp_path / "part-*.jsonl#3")).rows) == 3
    (tmp_path / "part-2.jsonl").write_text(f"{line('a')}\n{line('e')}")
    table = read(str(tmp_path / "part-*.jsonl"))
    (rejected,) = table.rejected
    assert (rejected.id, rejected.field, rejected.line) == ("a", "id", 1) and rejected.file.endswith("part-2.jsonl")
    with pytest.raises(DataError):
        read(str(tmp_path / "none-*.jsonl"))
    odd = tmp_path / "rows[1].jsonl"
    odd.write_text(line("odd"))
    assert [row.id for row in read(str(odd)).rows] == ["odd"]  # a file of that very name


@pytest.mark.parametrize("ids", ("own", "line"))
def test_files_of_one_name_in_several_folders_have_ids_of_their_own(tmp_path, ids):
    for place in ("one", "two", "deep/two"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "train.jsonl").write_text(f"{line()}\n{line()}")
    files = [str(tmp_path / place / "train.jsonl") for place in ("one", "two", "deep/two")]
    table = read(files, ids=ids)
    names = ("train", "two/train", "deep/two/train")
    assert [row.id for row in table.rows] == [f"{name}:{place}" for name in names for place in (1, 2)]
    assert table.rejected == ()
    assert [row.id for row in read(files[1], ids=ids).rows] == ["train:1", "train:2"]  # as in runs of before


def test_a_list_names_several_sources_in_its_order(tmp_path):
    for name, ids in (("a", "cd"), ("b-1", "xyz"), ("b-0", "uvw")):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(line, ids)))
    table = read([str(tmp_path / "b-*.jsonl#4"), str(tmp_path / "a.jsonl")])
    assert [row.id for row in table.rows][4:] == ["c", "d"] and table.counts == (6,)
    assert set(row.id for row in table.rows[:4]) < set("uvwxyz")
    twice = read([str(tmp_path / "a.jsonl")] * 2)
    assert len(twice.rows) == 2 and [each.field for each in twice.rejected] == ["id", "id"]
    config = Data(train=[str(tmp_path / "b-0.jsonl"), str(tmp_path / "b-1.jsonl")], eval=[str(tmp_path / "a.jsonl")])
    rows = read_run_rows(config, "grpo")
    assert [row.id for row in rows.train.rows] == list("uvwxyz") and [row.id for row in rows.heldout.rows] == ["c", "d"]
    mix = [{"path": [str(tmp_path / "b-*.jsonl#4"), str(tmp_path / "a.jsonl")], "weight": 0.5}]
    mixed = read_training_rows(Data(train=str(tmp_path / "b-0.jsonl"), mix=mix), "grpo")
    assert mixed.counts == (3, 6) and list(mixed.rows)[3:] == list(table.rows) and mixed.weights == (1.0, 0.5)


def compressed(file: Path, data: bytes) -> None:
    if file.suffix == ".gz":
        file.write_bytes(gzip.compress(data))
        return
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.CompressedOutputStream(str(file), "zstd") as stream:
        stream.write(data)


@pytest.mark.parametrize("name", ("rows.jsonl.gz", "rows.jsonl.zst"))
def test_compressed_rows(tmp_path, name, monkeypatch):
    file = tmp_path / name
    compressed(file, b"\xef\xbb\xbf" + f"{line('a')}\n\n{line('b')}\n".encode())
    assert [(row.id, row.line) for row in read(file).rows] == [("a", 1), ("b", 3)]
    whole = file.read_bytes()
    for data in (whole[: len(whole) // 2], b"plain text", b""):
        file.write_bytes(data)
        with pytest.raises(DataError):
            read(file)


@pytest.mark.parametrize("name", ("rows.jsonl.gz", "rows.jsonl.zst"))
@pytest.mark.parametrize("rows", ((line() + "\n").encode() * 2**15, line().encode() + b"\n" + b"x" * 2**23))
def test_compressed_rows_that_expand_beyond_measure(tmp_path, name, rows, monkeypatch):
    monkeypatch.setattr(readers, "_LEAST_LIMIT", 2**15)
    file = tmp_path / name
    compressed(file, rows)
    with pytest.raises(DataError, match="expands to more than"):
        read(file)


def test_bad_lines_are_rejected_with_line_and_reason(tmp_path):
    file = tmp_path / "rows.jsonl"
    deep = "[" * 200_000
    lines = [
        line("a"),
        "{broken",
        '{"messages": NaN}',
        '{"messages": -Infinity}',
        '{"messages": 1e999}',
        "[1]",
        "null",
        deep,
        line("a"),
        line("b", images=["../x.png"]),
        line("c"),
    ]
    file.write_bytes("\n".join(lines).encode() + b'\n{"x": "\xff"}\n')
    table = read(file)
    assert [row.id for row in table.rows] == ["a", "c"]
    assert table.total == 12
    reasons = {row.line: (row.field, row.reason) for row in table.rejected}
    assert sorted(reasons) == [2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    assert "not valid JSON" in reasons[2][1]
    assert "NaN is not a JSON number" in reasons[3][1]
    assert "-Infinity" in reasons[4][1]
    assert "outside the range" in reasons[5][1]
    assert reasons[6] == ("row", "is a JSON list, but a row must be an object")
    assert reasons[7] == ("row", "is a JSON null, but a row must be an object")
    assert "nested too deeply" in reasons[8][1]
    assert reasons[9] == ("id", "'a' is already the id of line 1; if rows share ids, set data.ids: line")
    assert reasons[10][0] == "images[0]"
    assert "not UTF-8 (byte 7" in reasons[12][1]


def test_json_list(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(f"[{line('a')}, 5, {line()}]")
    table = read(file)
    assert [(row.id, row.line) for row in table.rows] == [("a", 1), ("rows:3", 3)]
    assert table.rejected[0].reason == "is a JSON number, but a row must be an object"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rows.jsonl", b"", "no rows"),
        ("rows.jsonl", b"\n \n", "no rows"),
        ("rows.json", b" ", "no rows"),
        ("rows.json", b"[]", "no rows"),
        ("rows.json", b"{}", "contains a JSON object"),
        ("rows.json", b'{"a": 1}\n{"a": 2}\n', "name it .jsonl"),
        ("rows.jsonl", "{}".encode("utf-16"), "UTF-16"),
        ("rows.jsonl", b"x\n", "line 1: is not valid JSON"),
        ("rows.jsonl", b'{"messages": []}\n', "none of its rows (1)"),
        ("rows.csv", b"a,b", ".jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet"),
        ("rows.parquet", b"not parquet", "Parquet"),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, words):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(DataError, match="rows") as error:
        read(file)
    assert words in str(error.value)


def test_missing_file_and_missing_image_root(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read"):
        read(tmp_path / "rows.jsonl")
    source = RowSource(path=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"data\.image_root"):
        image_roots_of(source, config(image_root=str(tmp_path / "none")))
    assert image_roots_of(source, config()) == ImageRoots(base=str(tmp_path))


def test_format_can_be_set(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(line(answer="1", solution="2") + "\n")
    with pytest.raises(DataError, match="swift or tiercel"):
        read(file)
    assert read(file, format="swift").rows[0].answer == "2"
    assert read(file, format="tiercel").rows[0].answer == "1"


def test_norm1_boxes_read_the_image_header_under_the_root(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 20)).save(tmp_path / "images" / "a.png")
    file = tmp_path / "rows.jsonl"
    row = {
        "messages": [{"role": "user", "content": "<image><bbox>"}],
        "images": ["a.png"],
        "objects": {"bbox": [[0, 0.5, 0.5, 1]], "bbox_type": "norm1"},
    }
    file.write_text(json.dumps(row))
    assert read(file, image_root=str(tmp_path / "images")).rows[0].boxes == ((0.0, 10.0, 20.0, 20.0),)
    with pytest.raises(DataError, match="no such file"):
        read(file)


def test_parquet_with_embedded_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def png(colour):
        stream = io.BytesIO()
        Image.new("RGB", (3, 2), colour).save(stream, "PNG")
        return stream.getvalue()

    rows = [
        {
            "id": "a",
            "messages": [{"role": "user", "content": "<image>?", "name": None}],
            "images": [{"bytes": png("red"), "path": "a.png"}],
            "answer": "1",
            "level": 1,
        },
        {
            "id": "b",
            "messages": [{"role": "user", "content": "?", "name": None}],
            "images": None,
            "answer": None,
            "level": None,
        },
    ]
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    table = read(file)
    assert [row.id for row in table.rows] == ["a", "b"]
    first, second = table.rows
    assert (first.line, first.answer, first.columns) == (1, "1", {"level": 1})
    assert (second.line, second.images, second.columns) == (2, (), {"level": None})
    picture = decode(first.images[0], first.image_roots, 100)
    assert picture.size == (3, 2)
    assert picture.getpixel((0, 0)) == (255, 0, 0)


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pyarrow(name, *rest, **more):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(EnvironmentProblem, match="pip install pyarrow"):
        read(tmp_path / "rows.parquet")


def bad(number, reason="why"):
    return RejectedRow(id=f"r:{number}", file="r.jsonl", line=number, field="images[0]", reason=reason)


def test_bad_rows_are_recorded_once(tmp_path):
    file = tmp_path / "bad_rows.jsonl"
    write_bad_rows([], file)
    assert not file.exists()
    write_bad_rows([bad(1), bad(2, "café")], file)
    write_bad_rows([bad(2, "café"), bad(3), bad(3)], file)
    records = [json.loads(text) for text in file.read_text().splitlines()]
    assert [record["line"] for record in records] == [1, 2, 3]
    assert records[1] == {"id": "r:2", "file": "r.jsonl", "line": 2, "field": "images[0]", "reason": "café"}


def test_a_half_written_record_does_not_spoil_the_next(tmp_path):
    file = tmp_path / "bad_rows.jsonl"
    file.write_text('{"id": "r:1", "fi')
    write_bad_rows([bad(2)], file)
    assert json.loads(file.read_text().splitlines()[1])["line"] == 2


def test_bad_rows_that_cannot_be_written(tmp_path):
    with pytest.raises(RunError, match="bad_rows"):
        write_bad_rows([bad(1)], tmp_path / "none" / "bad_rows.jsonl")


def test_the_fraction_of_bad_rows():
    rejected = [bad(number) for number in range(1, 30)]
    require_few_bad(0, 0, config(), [])
    require_few_bad(1, 100, config(max_bad_fraction=0.01), rejected)
    require_few_bad(29, 100, config(max_bad_fraction=0.29), rejected)
    require_few_bad(100, 100, config(max_bad_fraction=1.0), rejected)
    with pytest.raises(DataError) as error:
        require_few_bad(2, 100, config(max_bad_fraction=0.01), rejected)
    assert error.value.exit_code == 2
    text = str(error.value)
    assert "2 of 100 rows" in text
    assert "data.max_bad_fraction = 0.01" in text
    assert "r.jsonl:5 (r:5) images[0]: why" in text
    assert "r.jsonl:6" not in text
    assert "and 24 more" in text


SAVED = Path(__file__).parent / "saved_dataset"  # two rows with pictures, saved with save_to_disk of datasets 5.2.0


def test_a_data_set_that_save_to_disk_wrote():
    table = read_rows(SAVED, config(), "grpo")
    assert [(row.id, row.line, row.answer) for row in table.rows] == [
        ("saved_dataset:1", 1, "red"),
        ("saved_dataset:2", 2, "blue"),
    ]
    colours = [decode(row.images[0], row.image_roots, 1000).getpixel((3, 3)) for row in table.rows]
    assert colours == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"dataset_dict.json": '{"splits": ["train", "test"]}'}, "name one of .*train, .*test"),
        ({"state.json": '{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}'}, "flatten_indices"),
        ({"state.json": '{"_data_files": [{"filename": "../x.arrow"}]}'}, "names files outside its own directory"),
        (
            {"state.json": '{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow": "junk"},
            "cannot be read as a data set",
        ),
        ({"state.json": "{"}, "not valid JSON"),
        ({"readme.txt": ""}, "is not a data set"),
        (
            {"train-00000-of-00001.parquet": "", "test-00000-of-00001.parquet": ""},
            "several data sets: test, train; put each data set",
        ),
    ],
)
def test_directories_that_are_no_data_set(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=says):
        read_rows(tmp_path, config(), "grpo")


@pytest.mark.parametrize("name", ("train-0000{0}-of-00002", "000{0}", "part-0000{0}-9c1e-c000.snappy", "part.{0}"))
def test_a_directory_of_parquet_files_is_one_data_set(tmp_path, name):
    """Files of the hub, of Spark and of dask."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number in range(2):
        columns = {"problem": [f"{number}a", f"{number}b"], "solution": ["x", "y"]}
        (tmp_path / "data").mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table(columns), tmp_path / "data" / f"{name.format(number)}.parquet")
    table = read_rows(tmp_path, config(), "grpo")
    assert [(row.line, row.messages[0].content) for row in table.rows] == [(1, "0a"), (2, "0b"), (3, "1a"), (4, "1b")]


def coco(tmp_path, annotations):
    file = tmp_path / "refs.json"
    images = [{"id": 5, "file_name": "a.png", "height": 50, "width": 100, "caption": "the cup"}]
    file.write_text(json.dumps({"images": images, "annotations": annotations}))
    Image.new("RGB", (100, 50)).save(tmp_path / "a.png")
    return file


def test_coco_annotations_with_expressions(tmp_path):
    file = coco(
        tmp_path,
        [
            {"id": 1, "image_id": 5, "bbox": [1, 2, 10, 20], "sentences": ["left cup", "red cup"]},
            {"id": 2, "image_id": 5, "bbox": [1, 2, 10, 20]},
            {"id": 3, "image_id": 6, "bbox": [1, 2, 10, 20]},
        ],
    )
    table = read(file, prompt="Where is {prompt}?")
    assert [(row.id, row.messages[0].content) for row in table.rows] == [
        ("1#1", "<image>Where is left cup?"),
        ("1#2", "<image>Where is red cup?"),
        ("2", "<image>Where is the cup?"),
    ]
    assert [row.reason for row in table.rejected] == ["annotation 3 names image 6, but `images` has no file for it"]
    assert [(row.columns["width"], row.columns["height"]) for row in table.rows] == [(100, 50)] * 3
    assert table.total == 4
    with pytest.raises(DataError, match=r"set data\.prompt"):
        read(file)


def test_files_are_mixed_by_weight_each_with_its_own_format_and_images(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one/rows.jsonl").write_text("\n".join(line(f"a{n}") for n in range(6)))
    (tmp_path / "two/rows.jsonl").write_text(json.dumps({"problem": "?", "solution": "x", "image": "a.png"}))
    mix = [{"path": str(tmp_path / "two/rows.jsonl"), "weight": 0.5}]
    table = read_training_rows(Data(train=str(tmp_path / "one/rows.jsonl"), mix=mix), "grpo")
    assert (table.counts, table.weights, table.total) == ((6, 1), (1.0, 0.5), 7)
    assert table.format == "tiercel, LLaVA and VLM-R1"
    assert [row.image_roots.base for row in table.rows][-2:] == [str(tmp_path / "one"), str(tmp_path / "two")]
    order = table.order(0, Data(train="-"))
    drawn = [table.rows[order.row(index)].image_roots.base for index in range(70)]
    assert drawn.count(str(tmp_path / "two")) == 20  # 2 of the 7 rows of a round


def test_rows_without_pictures_are_no_block_of_an_order_by_prefix(tmp_path):
    file = tmp_path / "rows.jsonl"
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    pictured = [line(f"a{number}", images=["a.png"]) for number in range(4)]
    file.write_text("\n".join([*pictured, *[line(f"text{number}") for number in range(20)]]))
    order = read(file).order(0, config(group_by_prefix=True))
    epochs = [[order.row(24 * epoch + place) for place in range(24)] for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows) == list(range(24))
        places = [rows.index(number) for number in range(4)]
        assert max(places) - min(places) == 3  # the rows of one picture are neighbours
    text = [[number for number in rows if number >= 4] for rows in epochs]
    assert all(each != sorted(each) for each in text) and text[0] != text[1] != text[2]
    assert all(min(rows[0], rows[-1]) >= 4 for rows in epochs)  # text on both sides of the pictures


def test_the_fix_report_has_every_rejected_row_as_it_was_read(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{line('a')}\nnonsense\n{json.dumps({'id': 'c', 'messages': []})}\n")
    table = read(file)
    assert write_fix_report(table.rejected, tmp_path / "fix.jsonl", Data(train="")) == 2
    found = [json.loads(each) for each in (tmp_path / "fix.jsonl").read_text().splitlines()]
    assert [(each["line"], each["field"]) for each in found] == [(2, "row"), (3, "messages")]
    assert found[0]["row"] == "nonsense" and found[1]["row"]["id"] == "c"


@pytest.mark.parametrize("rows", [[{"question": "?"}], {"rows": []}])
def test_json_of_several_lines_that_is_named_jsonl_is_told(tmp_path, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(rows, indent=2))
    with pytest.raises(DataError, match=r"line 1: begins JSON of several lines, .* name it \.json"):
        read(file)


def test_a_line_that_is_no_json_is_told_by_its_place_in_the_line_and_kept(tmp_path):
    file = tmp_path / "rows.jsonl"
    cut, wrong = '{"id": "一", "messages": [{"role": "user"', line("b").replace(": ", ": ,", 1)
    file.write_bytes("\n".join([line("a"), cut, wrong]).encode() + "\n是".encode("gbk"))
    table = read(file)
    cut_reason, wrong_reason, bytes_reason = (row.reason for row in table.rejected)
    assert (
        cut_reason
        == f"is not valid JSON: Expecting ',' delimiter at character {len(cut) + 1} of the line; was it cut short?"
    )
    assert wrong_reason == f"is not valid JSON: Expecting value at character {wrong.index(',') + 1} of the line"
    (tmp_path / "cut.jsonl").write_text(line("a") + '\n{"messages": "cut sho')
    (row,) = read(tmp_path / "cut.jsonl").rejected
    assert row.reason == (
        "is not valid JSON: Unterminated string starting at character 14 of the line; was it cut short?"
    )
    assert bytes_reason.startswith("is not UTF-8 (byte 0 of the row); convert the file")
    write_fix_report(table.rejected, tmp_path / "fix.jsonl", Data(train=""))
    written = (tmp_path / "fix.jsonl").read_text(encoding="utf-8")
    assert json.loads(written.splitlines()[0])["row"] == cut and "一" in written


def test_an_annotation_whose_image_is_no_name_is_rejected(tmp_path):
    good = {"image_id": 5, "bbox": [1, 2, 10, 20]}
    table = read(coco(tmp_path, [good, {**good, "image_id": [1]}]), prompt="{prompt}")
    assert [row.line for row in table.rejected] == [2] and len(table.rows) == 1


def test_a_value_that_python_cannot_hold_rejects_its_row_alone(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = pyarrow.array([b"a", b"\xff", b"c"]).cast(pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"problem": texts, "solution": ["x", "y", "z"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = read(tmp_path / "rows.parquet")
    assert [row.line for row in found.rows] == [1, 3]
    assert [(row.line, row.field) for row in found.rejected] == [(2, "row")]
    assert "cannot be read" in found.rejected[0].reason


def test_the_fix_report_holds_what_made_rows_unreadable(tmp_path):
    deep = "[" * 900 + "]" * 900
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{line("a")}\n{{"messages": "\\ud800"}}\n{{"messages": {deep}}}\n')
    table = read(file)
    assert write_fix_report(table.rejected, tmp_path / "fix.jsonl", Data(train="")) == 2
    found = [json.loads(each) for each in (tmp_path / "fix.jsonl").read_text().splitlines()]
    assert found[0]["row"] == {"messages": "\ud800"} and [each["line"] for each in found] == [2, 3]


def test_absolute_paths_are_judged_as_the_rows_are_read(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.png").symlink_to("/etc/hostname")
    paths = [str(tmp_path / name) for name in ("in/a.png", "out/a.png", "in/link.png")]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line(str(number), images=[path]) for number, path in enumerate(paths)))
    table = read(file, image_root=str(tmp_path / "in"))
    assert [row.id for row in table.rows] == ["0", "2"]  # whether the link leads out is checked on opening
    (rejected,) = table.rejected
    assert (rejected.id, rejected.field) == ("1", "images[0]")
    assert "add its directory to data.image_roots" in rejected.reason
    assert len(read(file, image_root=str(tmp_path / "in"), image_roots=(str(tmp_path),)).rows) == 3


def test_rows_that_share_ids_are_read_by_their_lines(tmp_path):
    """As in LLaVA's data sets, all rows of a picture have its id."""
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "A wall."}]
    file = tmp_path / "llava.json"
    file.write_text(json.dumps([{"id": f"0{number // 2}", "conversations": turns} for number in range(6)]))
    assert len(read(file).rejected) == 3
    table = read(file, ids="line")
    assert [row.id for row in table.rows] == [f"llava:{line}" for line in range(1, 7)] and not table.rejected
    assert [row.columns["id"] for row in table.rows] == ["00", "00", "01", "01", "02", "02"]
