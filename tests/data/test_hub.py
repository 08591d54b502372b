"""Data sets by name, through the package datasets. There is no network, so a name means a folder, a cache, or
nothing."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tiercel.config.data import Data, HeldOut
from tiercel.config.row_sources import row_source
from tiercel.data import hub, reading
from tiercel.data.index import FileStore
from tiercel.data.media.images import decode
from tiercel.data.reading import read_rows, read_run_rows
from tiercel.data.rejected_rows import write_fix_report
from tiercel.data.stores import MemoryStore
from tiercel.distributed.versions import fingerprint
from tiercel.errors import DataError, EnvironmentProblem

ROOT = Path(__file__).parents[2]
needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


def png(colour):
    stream = io.BytesIO()
    Image.new("RGB", (4, 3), colour).save(stream, "PNG")
    return stream.getvalue()


def write_parquet(folder, count=6):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    turns = [{"role": "user", "content": "<image>?"}]
    rows = [
        {"id": f"r{n}", "messages": turns, "images": [{"bytes": png("red"), "path": "a.png"}]} for n in range(count)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:2]), folder / "test-00000-of-00001.parquet")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Of datasets alone, for it reads its environment once."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def read(given, **keys):
    return read_rows(given, Data(train="-", **keys), "grpo")


@needs_datasets
def test_a_folder_by_split_and_count(cache, tmp_path):
    write_parquet(tmp_path / "scenes")
    table = read("hf:./scenes")
    assert [row.id for row in table.rows] == [f"r{number}" for number in range(6)]
    assert (table.format, table.rows[0].file, table.rows[3].line) == ("tiercel", "hf:./scenes:train", 4)
    picture = decode(table.rows[0].images[0], table.rows[0].image_roots, 100)
    assert (picture.size, picture.getpixel((0, 0))) == ((4, 3), (255, 0, 0))
    assert len(read("hf:./scenes:test").rows) == 2
    assert len(read("hf:./scenes:train[1:3]").rows) == 2
    assert len(read("hf:./scenes#4").rows) == 4
    rows = read_run_rows(Data(train="hf:./scenes", eval=HeldOut(count=2)), "grpo")
    assert (len(rows.train.rows), len(rows.heldout.rows)) == (4, 2)


@needs_datasets
def test_a_large_data_set_is_mapped_where_it_lies(cache, tmp_path, monkeypatch):
    write_parquet(tmp_path / "scenes")
    held = read("hf:./scenes")
    monkeypatch.setattr(reading, "MOST_HELD_BYTES", 1)
    mapped, part = (read(f"hf:./scenes:{split}", cache=str(tmp_path / "kept")) for split in ("train", "train[1:3]"))
    assert [type(table.rows.stores[0]) for table in (held, mapped, part)] == [MemoryStore, FileStore, MemoryStore]
    assert mapped.rows == held.rows and mapped.identity() == held.identity()
    assert [row.id for row in part.rows] == ["r1", "r2"]
    assert read("hf:./scenes:test+train", ids="line", cache=str(tmp_path / "kept")).rows[3].line == 4


@needs_datasets
def test_ranks_compare_the_files_of_the_cache(cache, tmp_path):
    write_parquet(tmp_path / "scenes")
    files = hub.cached_files(row_source("hf:./scenes"))
    assert files and all(file.is_relative_to(cache) and file.suffix == ".arrow" for file in files)
    assert fingerprint(files) != fingerprint(hub.cached_files(row_source("hf:./scenes:test")))


@needs_datasets
def test_pictures_that_a_folder_names_lie_in_it(cache, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "outside.png").write_bytes(png("blue"))
    (tmp_path / "pictures" / "a.png").write_bytes(png("red"))
    record = {"file_name": "a.png", "messages": [{"role": "user", "content": "?"}], "answer": "7"}
    (tmp_path / "pictures" / "metadata.jsonl").write_text(json.dumps(record))
    (row,) = read("hf:./pictures", image_root=str(tmp_path / "empty")).rows
    assert row.images[0].path == str(tmp_path / "pictures" / "a.png")
    assert decode(row.images[0], row.image_roots, 100).getpixel((0, 0)) == (255, 0, 0)
    (tmp_path / "pictures" / "a.png").unlink()
    (tmp_path / "pictures" / "a.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(DataError, match=r"data\.image_roots"):
        decode(row.images[0], row.image_roots, 100)


@needs_datasets
def test_rejected_rows_of_a_data_set_reach_the_fix_report(cache, tmp_path):
    (tmp_path / "rows").mkdir()
    lines = [{"messages": [{"role": "user", "content": "?"}]}, {"messages": [{"role": "system", "content": "?"}]}]
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    table = read("hf:./rows")
    assert write_fix_report(table.rejected, tmp_path / "report.jsonl", Data(train="")) == 1
    record = json.loads((tmp_path / "report.jsonl").read_text())
    assert (record["file"], record["line"], record["row"]) == ("hf:./rows:train", 2, lines[1])


@needs_datasets
def test_a_script_is_refused_and_not_run(cache, tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "made.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError, match=r"hf:\./made:train: is a script"):
        read("hf:./made")
    assert not (tmp_path / "ran").exists()


@needs_datasets
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.pkl", b"cos\nsystem\n(S'touch ran'\ntR.", "hf:"),
        # datasets below 4 does not know HDF5, and finds no data in such a folder.
        (
            "train.h5",
            b"\x89HDF\r\n\x1a\n",
            r"^hf:\./files:train: (has hdf5 files, .* save it as Parquet|cannot be read)",
        ),
        ("train.tar", b"", r"has webdataset files"),
        ("train.parquet", b"PAR1", "cannot be read: "),
        ("train.jsonl", b"{broken", "cannot be read: "),
    ],
)
def test_only_plain_files_are_read(cache, tmp_path, name, content, says):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        read("hf:./files")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


@needs_datasets
@pytest.mark.parametrize("named", ("../secret.txt", "{elsewhere}/secret.txt", "https://example.org/rows.txt"))
def test_a_readme_cannot_name_files_of_elsewhere(cache, tmp_path, named):
    (tmp_path / "secret.txt").write_text("a secret")
    folder = tmp_path / "scenes"
    folder.mkdir()
    path = named.format(elsewhere=tmp_path)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n")
    with pytest.raises(DataError) as caught:
        read("hf:./scenes", format="tiercel")
    assert "secret.txt, which is not a file of the data set" in str(caught.value) or "http" in named
    assert not list(tmp_path.rglob("*.arrow"))


@needs_datasets
def test_a_split_and_a_config_that_are_not_there(cache, tmp_path):
    write_parquet(tmp_path / "scenes")
    with pytest.raises(DataError, match=r"hf:\./scenes:dev: cannot be read: .*dev.* hf:ORGANISATION/NAME"):
        read("hf:./scenes:dev")
    folder = write_parquet(tmp_path / "two" / "en").parent
    write_parquet(tmp_path / "two" / "fr")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.parquet\n" for name in ("en", "fr"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(DataError, match=r"hf:\./two:train: .*en.*fr.*with /CONFIG"):
        read("hf:./two")


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentProblem, match=r"hf:org/name:train: .*pip install 'datasets>=4'"):
        hub.load(row_source("hf:org/name"))


@needs_datasets
def test_a_version_that_runs_scripts_is_refused(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(EnvironmentProblem, match=r"datasets 3\.6\.0 may run the code"):
        hub.load(row_source("hf:org/name"))


OFFLINE = """
import shutil, sys
from pathlib import Path
from tiercel.config.schema import Data
from tiercel.data.reading import read_rows
from tiercel.errors import DataError

home, scenes = map(Path, sys.argv[1:])
try:
    read_rows("hf:org/scenes", Data(train="-"), "grpo")
except DataError as error:
    print(error)
read_rows(f"hf:{scenes}", Data(train="-"), "grpo")
(made,) = (home / "datasets").glob("*/*/*/*/dataset_info.json")
shutil.copytree(made.parent, home / "datasets" / "org___scenes" / "default" / "0.0.0" / "0123456789abcdef")
shutil.rmtree(scenes)
print(len(read_rows("hf:org/scenes", Data(train="-"), "grpo").rows), "rows of the cache")
"""


@needs_datasets
def test_offline_a_data_set_comes_from_the_cache_or_the_remedy_is_named(tmp_path):
    """In a process of its own, for datasets reads its environment once."""
    home = tmp_path / "home"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("HF_DATASETS_CACHE", None)
    command = [sys.executable, "-c", OFFLINE, str(home), str(write_parquet(tmp_path / "scenes"))]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert finished.returncode == 0, finished.stderr
    said, cached = finished.stdout.splitlines()
    assert said.startswith("hf:org/scenes:train: the hub cannot be reached")
    assert str(home / "datasets") in said and "HF_HOME" in said and "tiercel check" in said
    assert cached == "6 rows of the cache"
