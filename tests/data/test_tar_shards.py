"""Tar shards: the members of a stem are a row, read by offset as in memory; what is not a plain file is refused."""

import io
import json
import os
import random
import tarfile

import pytest
from PIL import Image

from tests.data.test_index import both, config
from tiercel.data.index_sources import TarShard
from tiercel.data.readers import READERS
from tiercel.data.reading import read_rows
from tiercel.data.tar_shards import spans
from tiercel.errors import DataError

TURNS = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]


def picture(colour="red"):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(stream, "PNG")
    return stream.getvalue()


def add(tar, name, data=b"", **keys):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in keys.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))


def shard(file, members, format=tarfile.PAX_FORMAT):
    with tarfile.open(file, "w", format=format) as tar:
        for name, data, *keys in members:
            add(tar, name, data if isinstance(data, bytes) else json.dumps(data).encode(), **dict(*keys))
    return file


def row(stem, **keys):
    return [(f"{stem}.png", picture()), (f"{stem}.json", {"messages": TURNS, **keys})]


def records(file):
    return list(READERS[".tar"](file))


def test_members_of_a_stem_are_a_row(tmp_path):
    turns = {"messages": TURNS, "images": ["b.1.png", "b.0.png"]}
    members = [
        ("data", b"", {"type": tarfile.DIRTYPE}),
        ("data/a.png", picture()),
        ("data/._a.json", b"\0\5\x16\7"),  # of macOS
        ("data/a.json", {"messages": TURNS, "id": "own"}),
        (".DS_Store", b"\0"),
        ("data/b.0.png", picture("blue")),
        ("data/b.txt", "é".encode()),
        ("data/b.1.png", picture()),
        ("data/b.pkl", b"\x80\x04N."),
        ("data/b.json", turns),
        ("c.txt", b"a word"),
    ]
    first, second, third = records(shard(tmp_path / "a.tar", members))
    assert first.value == {"id": "own", "images": [{"bytes": picture(), "path": "a.png"}], "messages": TURNS}
    pictures = [{"bytes": picture(), "path": "b.1.png"}, {"bytes": picture("blue"), "path": "b.0.png"}]
    assert second.value == {"id": "data/b", "messages": TURNS, "images": pictures, "txt": "é", "pkl": b"\x80\x04N."}
    assert third.value == {"id": "c", "txt": "a word"} and [each.line for each in (first, second, third)] == [1, 2, 3]


@pytest.mark.parametrize(
    "members",
    [
        [("x.json", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})],
        [("x.json", b"", {"type": tarfile.LNKTYPE, "linkname": "a.json"})],
        [("x.json", b"", {"type": tarfile.FIFOTYPE})],
        [("../x.json", {"messages": TURNS})],
        [("in/../../x.json", {"messages": TURNS})],
        [("/etc/x.json", {"messages": TURNS})],
        [("x.json", b"{broken")],
        [("x.json", b"[1]")],
        [("x.json", b"")],
        [("x.txt", b"\xff")],
        [("x.txt", b"a"), ("x.txt", b"b")],
        [("x.txt", b"a"), ("x.json", {"txt": "b"})],
        [("x.png", picture()), ("x.json", {"messages": TURNS, "images": ["/etc/hostname"]})],
    ],
)
def test_a_row_that_is_refused_is_one_bad_row(tmp_path, members):
    found = records(shard(tmp_path / "a.tar", [*row("a"), *members, *row("b")]))
    assert [each.problem is None for each in found] == [True, False, True]


@pytest.mark.parametrize("cut", ["data", "padding", "header", "end"])
def test_a_shard_that_is_cut_short_ends_with_a_bad_row(tmp_path, cut):
    file = shard(tmp_path / "a.tar", [*row("a"), *row("b")], tarfile.USTAR_FORMAT)
    (_, first), (start, second) = spans(file)
    text = len(json.dumps({"messages": TURNS}))
    ends = {"data": start + second - 512 + text - 1, "padding": start + second - 1, "header": first + 100}
    data = file.read_bytes()[: ends.get(cut, start + second)]
    file.write_bytes(data)
    found = records(file)
    assert [each.problem is None for each in found] == [True, *([True] if cut == "end" else []), False]
    assert "cut short" in found[-1].problem


def test_headers_that_are_damaged_end_with_a_bad_row_and_other_files_are_no_shards(tmp_path):
    file = shard(tmp_path / "a.tar", [*row("a"), *row("b"), *row("c")], tarfile.USTAR_FORMAT)
    data = bytearray(file.read_bytes())
    start = list(spans(file))[1][0]
    data[start : start + 512] = b"x" * 512
    file.write_bytes(data)
    assert [each.problem is None for each in records(file)] == [True, False]
    data[start : start + 512] = negative = bytearray(tarfile.TarInfo("b.json").tobuf(tarfile.USTAR_FORMAT))
    negative[124:136] = b"\xff" * 10 + b"\xfc\x00"  # a size of -1024
    negative[148:156] = b" " * 8
    negative[148:156] = b"%06o\0 " % sum(negative)
    data[start : start + 512] = negative
    file.write_bytes(data)
    assert [each.problem is None for each in records(file)] == [True, False]
    for content in (b"", b"{}\n" * 400):
        file.write_bytes(content)
        with pytest.raises(DataError, match="tar file"):
            records(file)


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_an_index_equal_those_in_memory(tmp_path, monkeypatch, seed, is_small):
    """Small shards are read as a whole, others in parts that several processes share."""
    draw = random.Random(seed)
    monkeypatch.setattr("tiercel.data.index_sources._SPANS", 3)
    if not is_small:
        monkeypatch.setattr("tiercel.data.index_sources.LARGEST_SMALL_FILE", 0)
        monkeypatch.setattr("tiercel.data.tar_shards._KEPT_BYTES", 0)
    for part in range(2):
        members = []
        for number in range(draw.randint(5, 30)):
            stem = f"{part}/{'x' * draw.choice([1, 150])}-{number}"
            own = {"id": f"row-{draw.randrange(40)}"} if draw.random() < 0.3 else {}
            members += draw.choice([row(stem, **own), row(stem, **own), [(f"{stem}.json", b"{")]])
        file = shard(tmp_path / f"{part}.tar", members, draw.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]))
        if seed % 2:
            file.write_bytes(file.read_bytes()[: list(spans(file))[-1][0] + 700])
    for _ in range(2):
        held, found = both(monkeypatch, config(tmp_path, tmp_path / "*.tar", prompt=None), "sft")
        assert isinstance(found.train.rows.stores[0]._source, TarShard)
        assert (held.train.rejected, held.train.counts) == (found.train.rejected, found.train.counts)
        assert list(held.train.rows) == list(found.train.rows) and held.train.identity() == found.train.identity()
        orders = [table.order(3, config(tmp_path, "x")) for table in (held.train, found.train)]
        assert [orders[0].row(index) for index in range(99)] == [orders[1].row(index) for index in range(99)]


def test_json_may_name_members_in_turns_by_their_whole_path_or_beside_a_null(tmp_path):
    part = {"type": "image", "image": "a.png"}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    members = [
        *[("d/a.png", picture()), ("d/a.json", {"messages": turns})],
        *[("d/b.png", picture()), ("d/b.json", {"messages": TURNS, "image": "d/b.png"})],
        *[("d/c.png", picture()), ("d/c.json", {"messages": TURNS, "images": None, "image": "c.png"})],
        *[
            ("d/e.0.png", picture()),
            ("d/e.1.png", picture()),
            ("d/e.json", {"messages": turns, "more": "a.png e.0.png"}),
        ],
        *[("d/f.0.png", picture()), ("d/f.1.png", picture())],
        ("d/f.json", {"messages": [{"role": "user", "content": [{"type": "image", "image": "d/f.1.png"}]}]}),
    ]
    deep = [f"{each}" for each in ("[" * 900, '"é.png"', "]" * 900)]
    members += [("g.png", picture()), ("g.json", f'{{"messages": {"".join(deep).replace("é", "g")}}}'.encode())]
    url = {"type": "image_url", "image_url": {"url": "é.png"}}
    members += [("é.png", picture()), ("é.json", {"messages": [{"role": "user", "content": [url]}]})]
    a, b, c, e, f, g, h = records(shard(tmp_path / "a.tar", members))
    assert len(g.value["images"]) == 1 and h.value["messages"][0]["content"][0]["image"]["bytes"] == picture()
    assert a.value["messages"][0]["content"][0]["image"]["bytes"] == picture() and "images" not in a.value
    assert b.value["image"]["bytes"] == c.value["image"]["bytes"] == picture()
    assert [each["path"] for each in e.value["images"]] == ["e.0.png", "e.1.png"]  # no part names one of them
    assert "f.0.png" in f.problem
    file = shard(tmp_path / "b.tar", members[:6])
    rows = read_rows(file, config(tmp_path, "x", prompt=None), "grpo").rows
    assert [len(row.images) for row in rows] == [1, 1, 1]


def test_json_may_name_members_by_the_absolute_paths_at_which_they_once_lay(tmp_path):
    part = {"type": "image", "image": "/old/d/b.png"}
    turns = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    members = [
        *[("d/a.png", picture()), ("d/a.json", {"messages": TURNS, "images": ["/old/set/a.png"]})],
        *[("d/b.png", picture()), ("d/b.json", {"messages": turns})],
        *[("d/c.png", picture()), ("d/c.json", {"messages": TURNS, "image": "C:\\old\\c.png"})],
        *[("d/e.png", picture()), ("d/e.json", {"messages": TURNS, "images": ["/one/e.png", "/two/e.png"]})],
    ]
    a, b, c, e = records(shard(tmp_path / "a.tar", members))
    assert a.value["images"][0]["bytes"] == c.value["image"]["bytes"] == picture()
    assert b.value["messages"][0]["content"][0]["image"]["bytes"] == picture()
    assert "e.png" in e.problem  # two files, but one member


def test_a_tar_that_is_compressed_is_refused_by_name(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.tar"):
        read_rows(tmp_path / "a.tar.gz", config(tmp_path, "x"), "sft")


def test_shards_that_are_large_together_are_indexed_and_none_is_held_open(tmp_path, monkeypatch):
    size = sum(shard(tmp_path / f"{n}.tar", row(f"{n}")).stat().st_size for n in range(3))
    data = config(tmp_path, tmp_path / "*.tar", prompt=None)
    for most, kind in ((size + 1, "MemoryStore"), (size, "FileStore")):
        monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", most)
        rows = read_rows(data.train, data, "sft").rows
        assert [type(store).__name__ for store in rows.stores] == [kind] * 3
    assert [each.id for each in rows] == ["0", "1", "2"]
    assert not any(os.readlink(f"/proc/self/fd/{fd}").endswith(".tar") for fd in fds())


def test_a_small_shard_that_was_just_read_is_read_again_if_it_has_changed(tmp_path):
    file = shard(tmp_path / "a.tar", row("a"))
    assert [each.value["id"] for each in records(file)] == ["a"]
    os.replace(shard(tmp_path / "new.tar", row("b")), file)
    assert [each.value["id"] for each in records(file)] == ["b"]


def test_each_index_maps_one_file_because_a_process_may_map_some_65000(tmp_path, monkeypatch):
    for number in range(3):
        shard(tmp_path / f"{number}.tar", row(f"{number}"))
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0)
    data = config(tmp_path, tmp_path / "*.tar", prompt=None)
    rows = read_rows(data.train, data, "sft").rows
    with open("/proc/self/maps") as maps:
        assert sum(f"{tmp_path}/cache/" in line for line in maps) == len(rows.stores) == 3
    assert not any(f"{tmp_path}/" in os.readlink(f"/proc/self/fd/{fd}") for fd in fds())  # a limit of some thousand


def fds():
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
