"""Where the images of rows are looked for, in ms-swift and in tiercel."""

import json

import pytest

from tests.convert.helpers import TRL, drafted, told
from tiercel.config.row_sources import row_source
from tiercel.config.schema import Data
from tiercel.data.media.images import resolve
from tiercel.data.row_files import image_roots_of

LINE = "swift sft --model ./m --dataset data/rows.jsonl"


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
    return resolve(path, image_roots_of(row_source("data/rows.jsonl"), config)).read_bytes()


def test_relative_paths_start_in_the_working_directory():
    write_rows({"images": ["data/images/a.png"]})
    write_image("data/images/a.png")
    assert root(LINE) == "."
    assert opened(LINE, "data/images/a.png") == b"picture"


def test_rows_in_the_working_directory_or_of_a_hub_need_no_key():
    write_rows({"images": ["a.png"]}, file="rows.jsonl")
    for name in ("rows.jsonl", "rows.jsonl#3", "org/rows", "HF::org/rows"):
        assert root(f"swift sft --model ./m --dataset {name}") is None


def test_the_variable_is_the_root():
    write_rows({"images": ["images/a.png"]})
    write_image("data/images/a.png")
    draft = drafted(f"ROOT_IMAGE_DIR=data {LINE}")
    assert draft.values["data.image_root"] == "data" and draft.origins["data.image_root"].labels == ("ROOT_IMAGE_DIR",)
    assert "ROOT_IMAGE_DIR=data: ms-swift searches the working directory first" in told(draft)
    assert opened(f"ROOT_IMAGE_DIR=data {LINE}", "images/a.png") == b"picture"
    assert root(f"export ROOT_IMAGE_DIR=/mnt/images\n{LINE}") == "/mnt/images"


def test_other_frameworks_do_not_read_the_variable():
    draft = drafted(f"ROOT_IMAGE_DIR=x {TRL}")
    assert "data.image_root" not in draft.values
    assert [note.is_change for note in draft.notes if note.subject.startswith("ROOT_IMAGE_DIR")] == [False]


def test_held_out_and_mixed_files_are_looked_at_too():
    assert root("swift sft --model ./m --dataset rows.jsonl data/more.jsonl#1") == "."
    assert root("swift sft --model ./m --dataset rows.jsonl --val_dataset data/more.jsonl") == "."
