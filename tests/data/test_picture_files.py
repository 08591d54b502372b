"""Pictures of the same names with other contents: their sizes, beginnings and ends reveal it."""

from dataclasses import replace

import pyarrow
import pytest
from pyarrow import parquet

from tests.tiny_models import noise_image
from tiercel.config.data import Data
from tiercel.data import picture_files
from tiercel.data.picture_files import digest_of_pictures, missing_files
from tiercel.data.reading import read_run_rows
from tiercel.types import ImageRoots, ImageSource, Message, Row, VideoSource


def row(folder, **changes) -> Row:
    message = Message(role="user", content="<image>What?")
    shown = Row(id="r", messages=(message,), images=(ImageSource(path="a.png"),), videos=(), answer=None, columns={},
                file="rows.jsonl", line=1, image_roots=ImageRoots(base=str(folder)))  # fmt: skip
    return replace(shown, **changes)


@pytest.mark.parametrize("place", (0, 9_999))
def test_a_byte_of_the_beginning_or_the_end_tells(tmp_path, place):
    data = bytearray(10_000)
    (tmp_path / "a.png").write_bytes(data)
    before = digest_of_pictures([row(tmp_path)])
    (tmp_path / "a.png").touch()
    assert digest_of_pictures([row(tmp_path)]) == before
    data[place] = 1
    (tmp_path / "a.png").write_bytes(data)
    assert digest_of_pictures([row(tmp_path)]) != before


def test_a_pixel_in_the_middle_tells_by_the_checksum_at_the_end(tmp_path):
    picture = noise_image(200, 200, seed=0)
    picture.save(tmp_path / "a.png", compress_level=0)
    before, size = digest_of_pictures([row(tmp_path)]), (tmp_path / "a.png").stat().st_size
    picture.putpixel((100, 100), (1, 2, 3))
    picture.save(tmp_path / "a.png", compress_level=0)
    assert digest_of_pictures([row(tmp_path)]) != before and (tmp_path / "a.png").stat().st_size == size


def test_pictures_in_the_row_frames_films_and_the_rejected_side_count(tmp_path):
    for name in ("a.png", "b.mp4"):
        (tmp_path / name).write_bytes(b"1")
    inside = [row(tmp_path, images=(ImageSource(path="a.png", data=data),)) for data in (b"1", b"2")]
    assert digest_of_pictures(inside[:1]) != digest_of_pictures(inside[1:])
    for videos in ((VideoSource(path="b.mp4"),), (VideoSource(path="f", frames=(ImageSource(path="b.mp4"),)),)):
        (tmp_path / "b.mp4").write_bytes(b"1")
        pair = row(tmp_path, rejected=row(tmp_path, images=(), videos=videos))
        before = digest_of_pictures([pair])
        (tmp_path / "b.mp4").write_bytes(b"2")
        assert digest_of_pictures([pair]) != before


def test_of_many_rows_some_are_looked_at_and_a_lost_picture_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(picture_files, "MOST_ROWS", 2)
    rows = [row(tmp_path, images=(ImageSource(path=f"{number}.png"),)) for number in range(4)]
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(b"1")
    before, beats = digest_of_pictures(rows), list[None]()
    changed = []
    for number in range(4):
        (tmp_path / f"{number}.png").unlink()
        changed.append(digest_of_pictures(rows, lambda: beats.append(None)) != before)
        (tmp_path / f"{number}.png").write_bytes(b"1")
    assert changed == [True, False, True, False] and len(beats) == 8
    assert digest_of_pictures([]) != before


@pytest.mark.parametrize("embedded", (True, False))
def test_of_an_index_the_digest_is_kept_unless_rows_name_files(tmp_path, monkeypatch, embedded):
    monkeypatch.setattr("tiercel.data.reading.MOST_HELD_BYTES", 0)
    noise_image(9, 9, seed=0).save(tmp_path / "a.png")
    picture = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None} if embedded else "a.png"
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "!"}]
    table = pyarrow.Table.from_pylist([{"id": str(each), "images": [picture], "messages": turns} for each in range(3)])
    parquet.write_table(table, tmp_path / "rows.parquet")
    data = Data(train=str(tmp_path / "rows.parquet"), cache=str(tmp_path / "cache"))
    rows = read_run_rows(data, "sft").train.rows
    before, beats = digest_of_pictures(rows), list[None]()
    assert digest_of_pictures(list(rows)) == before
    assert digest_of_pictures(rows, lambda: beats.append(None)) == before and len(beats) == (0 if embedded else 3)
    noise_image(9, 9, seed=1).save(tmp_path / "a.png")
    assert (digest_of_pictures(rows) == before) is embedded


@pytest.mark.parametrize("few", (0, 64))
def test_files_that_do_not_exist_are_found_without_being_opened(tmp_path, monkeypatch, few):
    monkeypatch.setattr(picture_files, "_FEW_NAMES", few)
    (tmp_path / "a.png").write_bytes(b"no picture")
    (tmp_path / "link.png").symlink_to("nowhere.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "alias.png").symlink_to("a.png")
    films = (VideoSource(path="gone.mp4"), VideoSource(path="f", frames=(ImageSource(path="lost/a.png"),)))
    rows = [
        row(tmp_path, id="whole"),
        row(tmp_path, id="alias", images=(ImageSource(path="alias.png"),)),
        row(tmp_path, id="embedded", images=(ImageSource(path="b.png", data=b"1"),)),
        *(row(tmp_path, id=name, images=(ImageSource(path=name),)) for name in ("link.png", "folder.png", "A.png")),
        *(row(tmp_path, id=film.path, images=(), videos=(film,)) for film in films),
        row(tmp_path, id="side", rejected=row(tmp_path, id="side", images=(ImageSource(path="/gone.png"),))),
    ]
    missing = [each.id for each in missing_files(rows)]
    assert missing == ["link.png", "folder.png", "A.png", "gone.mp4", "f", "side"]
