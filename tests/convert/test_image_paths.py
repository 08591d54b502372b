"""Where the images of rows are searched, in ms-swift and here."""

import json

import pytest

from tests.convert.helpers import TRL, drafted, told
from tiercel.config.row_sources import row_source
from tiercel.config.schema import Data
from tiercel.data.media.images import resolve
from tiercel.data.reading import image_roots

LINE = "swift sft --model ./m --dataset data/rows.jsonl"
SUBJECT = "images in the rows"  # of all these notes


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "data" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(*columns: dict[str, object], file: str = "data/rows.jsonl") -> None:
    rows = ({"messages": [{"role": "user", "content": "<image>What?"}], **each} for each in columns)
    with open(file, "w", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps(row)}\n" for row in rows)


def write_image(path: str) -> None:
    with open(path, "wb") as stream:
        stream.write(b"picture")


def root(line: str) -> object:
    return drafted(line).values.get("data.image_root")


def opened(line: str, path: str) -> bytes:
    """The file that the recipe's rows find by a path."""
    values = drafted(line).values
    config = Data(train="data/rows.jsonl", image_root=values.get("data.image_root"))
    return resolve(path, image_roots(row_source("data/rows.jsonl"), config)).read_bytes()


def test_relative_paths_start_in_the_working_directory():
    write_rows({"images": ["data/images/a.png"]})
    write_image("data/images/a.png")
    assert root(LINE) == "."
    assert opened(LINE, "data/images/a.png") == b"picture"
    assert SUBJECT not in told(drafted(LINE))


@pytest.mark.parametrize(
    "column",
    [
        {"image": "pictures/a.png"},
        {"images": [{"path": "pictures/a.png", "bytes": None}]},
        {"videos": ["pictures/a.mp4"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "pictures/a.png"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "pictures/a.png"}}]}]},
    ],
)
def test_a_relative_path_in_any_column_counts_where_no_image_is_here(column):
    write_rows(column)
    assert root(LINE) == "."


@pytest.mark.parametrize(
    "column", [{}, {"images": [{"path": "a.png", "bytes": "x"}]}, {"images": ["data:image/png;base64,aaaa"]}]
)
def test_rows_without_paths_need_nothing(column):
    write_rows(column)
    assert root(LINE) is None and SUBJECT not in told(drafted(LINE))


def test_images_that_are_only_beside_the_rows_are_found_there():
    write_rows({"images": ["images/a.png"]})
    write_image("data/images/a.png")
    assert root(LINE) is None
    assert opened(LINE, "images/a.png") == b"picture"


def test_rows_in_the_working_directory_need_no_key():
    write_rows({"images": ["a.png"]}, file="rows.jsonl")
    assert root("swift sft --model ./m --dataset rows.jsonl") is None


def test_the_variable_is_the_root():
    write_rows({"images": ["images/a.png"]})
    write_image("data/images/a.png")
    draft = drafted(f"ROOT_IMAGE_DIR=data {LINE}")
    assert draft.values["data.image_root"] == "data" and draft.origins["data.image_root"].labels == ("ROOT_IMAGE_DIR",)
    assert "ROOT_IMAGE_DIR" not in told(draft)
    assert opened(f"ROOT_IMAGE_DIR=data {LINE}", "images/a.png") == b"picture"
    assert root(f"export ROOT_IMAGE_DIR=/mnt/images\n{LINE}") == "/mnt/images"


def test_a_file_of_the_working_directory_comes_before_the_variable():
    write_rows({"images": ["data/images/a.png"]})
    write_image("data/images/a.png")
    draft = drafted(f"ROOT_IMAGE_DIR=other {LINE}")
    assert "ROOT_IMAGE_DIR=other: the working directory has data/images/a.png and comes first there" in told(draft)


def test_other_frameworks_do_not_read_the_variable():
    draft = drafted(f"ROOT_IMAGE_DIR=x {TRL}")
    assert "data.image_root" not in draft.values
    assert [note.is_change for note in draft.notes if note.subject.startswith("ROOT_IMAGE_DIR")] == [False]


def test_rows_that_are_not_here_are_told():
    said = "relative paths of images in the rows: start in the working directory there, and beside the rows here"
    assert said in told(drafted(LINE))
    assert said not in told(drafted(f"ROOT_IMAGE_DIR=x {LINE}"))
    for name in ("rows.jsonl", "org/rows", "HF::org/rows"):
        assert said not in told(drafted(f"swift sft --model ./m --dataset {name}"))


def test_absolute_paths_and_addresses_are_told(place):
    write_rows(
        {"images": ["/mnt/coco/train/a.jpg"]}, {"images": ["/mnt/coco/val/b.jpg"]}, {"images": ["http://x/c.jpg"]}
    )
    said = told(drafted(LINE))
    assert "are opened only where a key names their directory: data.image_roots: [/mnt/coco]" in said
    assert "images in the rows by URL: tiercel downloads none" in said
    assert root(LINE) is None
    write_rows({"images": [str(place / "data" / "images" / "a.jpg")]})
    assert SUBJECT not in told(drafted(LINE))
    write_rows({"images": ["/a/b.jpg"]}, {"images": ["/c/d.jpg"]})
    assert "data.image_roots: [/a, /c]" in told(drafted(LINE))


def test_held_out_and_mixed_files_are_looked_at_too():
    write_rows({"images": ["pictures/a.png"]}, file="data/more.jsonl")
    line = "swift sft --model ./m --dataset rows.jsonl data/more.jsonl#1"
    assert root(line) == "."
    assert root("swift sft --model ./m --dataset rows.jsonl --val_dataset data/more.jsonl") == "."


def test_a_file_that_cannot_be_read_is_as_one_that_is_not_here(place):
    (place / "data" / "rows.json").write_text("{no json")
    assert "relative paths of images" in told(drafted(LINE.replace("jsonl", "json")))
    (place / "data" / "rows.jsonl").write_text('{"images": ' + "[" * 800 + "]" * 800 + "}\n")
    drafted(LINE)
