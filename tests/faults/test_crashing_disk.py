"""The disk that crashes: what each ending leaves of a careless write and of a careful one."""

from pathlib import Path

import pytest

from benchmarks.faults.crashing_disk import Crash, CrashingDisk
from tiercel.runs.files import write_atomically


def left(tmp_path: Path, write, at: int | None, ending) -> dict[str, str]:
    """Files and their texts after a crash at operation `at`, or at the end."""
    root = tmp_path / f"{at}-{ending}"
    root.mkdir()
    (root / "a").write_text("old")
    disk = CrashingDisk(root, tmp_path / f"aside-{at}-{ending}", at, ending)
    try:
        with disk.watched():
            write(root / "a")
    except Crash:
        assert disk.has_crashed
    remains = disk.remains(tmp_path / f"left-{at}-{ending}")
    return {path.name: path.read_text() for path in remains.iterdir()}


def careless(path: Path) -> None:
    path.with_name("b").write_text("newer")
    path.with_name("b").rename(path)


def careful(path: Path) -> None:
    write_atomically(path, "newer")


@pytest.mark.parametrize(
    ("at", "ending", "expected"),
    [
        (0, "stopped", {"a": "old"}),
        (1, "stopped", {"a": "old", "b": ""}),
        (1, "half", {"a": "old", "b": "ne"}),
        (2, "stopped", {"a": "old", "b": "newer"}),
        (2, "lost", {"a": "old", "b": ""}),
        (2, "undone", {"a": "old"}),
        (None, "stopped", {"a": "newer"}),
        (None, "lost", {"a": ""}),
        (None, "undone", {"a": "old"}),
    ],
)
def test_a_careless_write_loses_what_was_not_flushed(tmp_path, at, ending, expected):
    assert left(tmp_path, careless, at, ending) == expected


def test_a_careful_write_leaves_the_old_text_or_the_new(tmp_path):
    for at in range(5):  # open, write, fsync, replace, fsync of the directory
        for ending in ("stopped", "half", "lost", "undone"):
            assert left(tmp_path, careful, at, ending)["a"] in ("old", "newer")
    for ending in ("stopped", "lost", "undone"):
        assert left(tmp_path, careful, None, ending) == {"a": "newer"}


def test_what_is_removed_comes_back_where_it_was_not_flushed(tmp_path):
    assert left(tmp_path, Path.unlink, None, "stopped") == {}
    assert left(tmp_path, Path.unlink, None, "undone") == {"a": "old"}
