"""Checkpoints: what makes one valid, which one is used, and what a crash leaves behind."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercel.errors import RunError
from tiercel.runs import checkpoints
from tiercel.runs.checkpoints import (
    LATE_SCORE,
    MANIFEST,
    SCORE,
    FoundCheckpoint,
    best_scored,
    directory_of,
    list_checkpoints,
    newest_valid,
    problem_with,
    prune,
    save_checkpoint,
)
from tiercel.runs.files import file_sha256


def write_weights(text: str = "weights"):
    """What a run writes: a file, and one in a folder."""

    def write(directory: Path) -> None:
        (directory / "optimizer.bin").write_text("moments " + text)
        (directory / "adapter").mkdir()
        (directory / "adapter" / "weights.bin").write_text(text)

    return write


def save(root: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(root, step, write_weights(str(step)), {"next_index": 4 * step})


def found_by(root: Path) -> tuple[FoundCheckpoint | None, list[str]]:
    said: list[str] = []
    return newest_valid(root, said.append), said


def test_a_saved_checkpoint_is_found_whole(tmp_path):
    path = save_checkpoint(tmp_path, 50, write_weights(), {"next_index": 200, "loss_scaler": {"scale": 1.5}})
    assert path == directory_of(tmp_path, 50) == tmp_path / "step-000050"
    found, said = found_by(tmp_path)
    assert found == FoundCheckpoint(
        step=50, path=path, state={"step": 50, "next_index": 200, "loss_scaler": {"scale": 1.5}}
    )
    assert said == []
    hashes = json.loads((path / MANIFEST).read_text())["sha256"]
    assert sorted(hashes) == ["adapter/weights.bin", "optimizer.bin", "state.json"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000050"]


def test_the_newest_wins_by_number(tmp_path):
    save(tmp_path, 9, 1_000_000, 100)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1_000_000, 100, 9]
    found, _ = found_by(tmp_path)
    assert found is not None and found.step == 1_000_000


def test_nothing_to_find(tmp_path):
    assert found_by(tmp_path) == (None, [])
    assert found_by(tmp_path / "absent") == (None, [])
    (tmp_path / "step-000005").write_text("a file, not a directory")
    (tmp_path / "step-x").mkdir()
    found, _ = found_by(tmp_path)
    assert found is None


def flip_a_byte(path: Path) -> None:
    file = path / "adapter" / "weights.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(bytes(data))


def cut_the_manifest(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[: len(text) // 2])


def state_hash(path: Path, name: str, value: object) -> None:
    """State one more hash in the manifest."""
    hashes = json.loads((path / MANIFEST).read_text())["sha256"]
    (path / MANIFEST).write_text(json.dumps({"sha256": hashes | {name: value}}))


def write_state(path: Path, text: str) -> None:
    """With a manifest that fits."""
    (path / "state.json").write_text(text)
    state_hash(path, "state.json", file_sha256(path / "state.json"))


DAMAGE = {
    "adapter/weights.bin does not have the sha256": flip_a_byte,
    "optimizer.bin does not have the sha256": lambda path: (path / "optimizer.bin").write_text("moments 2x"),
    "adapter/weights.bin is missing": lambda path: (path / "adapter" / "weights.bin").unlink(),
    "state.json is missing": lambda path: (path / "state.json").unlink(),
    f"{MANIFEST} is missing or unreadable": cut_the_manifest,
    f"{MANIFEST} is missing": lambda path: (path / MANIFEST).unlink(),
    f"{MANIFEST} is missing or unreadabl": lambda path: (path / MANIFEST).write_text("[]"),
    f"{MANIFEST} is missing or unreada": lambda path: (path / MANIFEST).write_text('{"sha256": ["optimizer.bin"]}'),
    f"{MANIFEST} is missing or unread": lambda path: (path / MANIFEST).write_bytes(b"\xff\xfe\x00"),
    f"{MANIFEST} is missing or unrea": lambda path: (path / MANIFEST).write_text("[" * 100_000),
    "state.json does not have": lambda path: state_hash(path, "state.json", 7),
    "state.json is not JSON": lambda path: write_state(path, "{"),
    "state.json is not of this step": lambda path: write_state(path, '{"step": 21}'),
    "state.json is not of this ste": lambda path: write_state(path, "[]"),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, problem):
    save(tmp_path, 10, 20)
    damaged = directory_of(tmp_path, 20)
    DAMAGE[problem](damaged)
    found, said = found_by(tmp_path)
    assert found is not None and found.step == 10
    (line,) = said
    assert line.startswith(f"checkpoint {damaged} is passed over: {problem}")


@pytest.mark.parametrize("name", (".DS_Store", ".nfs0001", "adapter/note.txt", "adapter/.cache/huggingface/x.lock"))
def test_files_that_the_manifest_does_not_list_do_not_matter(tmp_path, name):
    save(tmp_path, 10)
    other = directory_of(tmp_path, 10) / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("of something else")
    assert problem_with(directory_of(tmp_path, 10)) is None


@pytest.mark.parametrize("name", ["MANIFEST.json", "adapter/weights.bin", "state.json"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(tmp_path, monkeypatch, name):
    save(tmp_path, 10, 20)
    stale = directory_of(tmp_path, 20) / name

    def open_or_fail(given, read):
        if Path(given) == stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(given)

    for reader in ("file_sha256", "read_regular"):
        honest = getattr(checkpoints, reader)
        monkeypatch.setattr(checkpoints, reader, lambda file, honest=honest: open_or_fail(file, honest))
    with pytest.raises(RunError, match=f"{name}: cannot be read now: Stale file handle"):
        newest_valid(tmp_path, print)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [20, 10]


def test_a_file_that_is_a_folder_is_damage(tmp_path):
    save(tmp_path, 10)
    (directory_of(tmp_path, 10) / "state.json").unlink()
    (directory_of(tmp_path, 10) / "state.json").mkdir()
    assert problem_with(directory_of(tmp_path, 10)) == "state.json is missing"


def test_all_damaged_is_none_and_each_is_named(tmp_path):
    save(tmp_path, 10, 20)
    for step in (10, 20):
        flip_a_byte(directory_of(tmp_path, step))
    found, said = found_by(tmp_path)
    assert found is None
    assert [line.split()[1] for line in said] == [str(directory_of(tmp_path, step)) for step in (20, 10)]


def test_an_empty_manifest_does_not_make_a_checkpoint(tmp_path):
    path = directory_of(tmp_path, 5)
    path.mkdir()
    (path / MANIFEST).write_text('{"sha256": {}}')
    assert problem_with(path) == "state.json is not in the manifest"


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 10)

    def crash(directory: Path) -> None:
        (directory / "half.bin").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 20, crash, {})
    found, said = found_by(tmp_path)
    assert found is not None and (found.step, said) == (10, [])
    assert (tmp_path / ".step-000020.tmp" / "half.bin").exists()

    save(tmp_path, 20)  # the half-written file is not reused
    assert problem_with(directory_of(tmp_path, 20)) is None
    assert not (directory_of(tmp_path, 20) / "half.bin").exists()


def test_saving_a_step_again_replaces_a_damaged_one(tmp_path):
    for _ in range(2):
        save(tmp_path, 20)
        flip_a_byte(directory_of(tmp_path, 20))
    save(tmp_path, 20)
    assert problem_with(directory_of(tmp_path, 20)) is None
    names = ["step-000020", "step-000020.damaged", "step-000020.damaged-2"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == names


def test_a_whole_checkpoint_of_the_same_step_stays(tmp_path):
    save(tmp_path, 20)
    before = file_sha256(directory_of(tmp_path, 20) / MANIFEST)
    assert save_checkpoint(tmp_path, 20, write_weights("other"), {}) == directory_of(tmp_path, 20)
    assert file_sha256(directory_of(tmp_path, 20) / MANIFEST) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000020"]


def test_too_little_space_is_refused_before_anything_is_written(tmp_path):
    root = tmp_path / "checkpoints"
    with pytest.raises(RunError, match=rf"{root}: the checkpoint needs 1{',000' * 6} bytes, but the disk has .* free"):
        save_checkpoint(root, 20, write_weights(), {}, expected_bytes=10**18)
    assert list(root.iterdir()) == []


def test_prune_keeps_the_newest_and_removes_leftovers(tmp_path):
    save(tmp_path, 10, 20, 30, 40)
    (tmp_path / ".step-000050.tmp").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    prune(tmp_path, 40, keep=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "step-000030", "step-000040"]


def test_what_cannot_be_removed_stays_and_is_told(tmp_path, monkeypatch, caplog):
    save(tmp_path, 10, 20, 30)
    (tmp_path / ".step-000040.tmp").mkdir()
    unlink = Path.unlink

    def refuse(file, **how):
        if "step-000010" in str(file):
            raise PermissionError(13, "Permission denied")
        unlink(file, **how)

    monkeypatch.setattr(Path, "unlink", refuse)
    prune(tmp_path, 30, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000010", "step-000030"]
    assert "step-000010" in caplog.text and "Permission denied" in caplog.text


def test_a_leftover_of_another_step_makes_room_for_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / ".step-000050.tmp").mkdir()
    free = lambda path: SimpleNamespace(free=0 if (tmp_path / ".step-000050.tmp").exists() else 10**9)  # noqa: E731
    monkeypatch.setattr("shutil.disk_usage", free)
    save_checkpoint(tmp_path, 60, write_weights(), {}, expected_bytes=10**6)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-000060"]


def test_prune_removes_only_what_a_run_wrote(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    save(root, 10, 20, 30, 40)
    save(elsewhere, 5)
    (root / "step-000005").symlink_to(elsewhere / "step-000005")
    for name in ("step-1", "step-000007", ".step-thesis.tmp", "step-000010 (copy)", "step-000020.damaged"):
        (root / name).mkdir()
        (root / name / "thesis.txt").write_text("mine")
    shutil.copytree(root / "step-000010", root / "step-000010.mine")
    prune(root, 40, keep=1)
    left = {path.name for path in root.iterdir()}
    assert left == {
        *("step-000040", "step-000005", "step-1", "step-000007", ".step-thesis.tmp", "step-000010 (copy)"),
        *("step-000020.damaged", "step-000010.mine"),
    }
    assert problem_with(elsewhere / "step-000005") is None


def test_prune_leaves_what_somebody_has_put_into_a_checkpoint(tmp_path):
    root, mine = tmp_path / "checkpoints", tmp_path / "mine"
    save(root, 10, 20, 30)
    mine.mkdir()
    (mine / "weights").write_text("mine")
    (root / "step-000010" / "notes").mkdir()
    (root / "step-000010" / "notes" / "thesis.txt").write_text("mine")
    (root / "step-000010" / "link").symlink_to(mine)
    prune(root, 30, keep=1)
    left = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    assert {name for name in left if not name.startswith("step-000030")} == {
        *("step-000010", "step-000010/notes", "step-000010/notes/thesis.txt", "step-000010/link"),
    }
    assert (mine / "weights").read_text() == "mine"


@pytest.mark.parametrize("name", ("../../thesis.txt", "{outside}", "folder/thesis.txt", "nul\0"))
def test_a_manifest_that_names_what_is_elsewhere(tmp_path, name):
    root, outside = tmp_path / "checkpoints", tmp_path / "thesis.txt"
    save(root, 10, 20)
    outside.write_text("mine")
    (root / "step-000010" / "folder").symlink_to(tmp_path)
    manifest = root / "step-000010" / MANIFEST
    listed = json.loads(manifest.read_text())
    listed["sha256"][name.format(outside=outside)] = file_sha256(outside)
    manifest.write_text(json.dumps(listed))
    assert problem_with(root / "step-000010") is not None
    prune(root, 20, keep=1)
    assert outside.read_text() == "mine" and (root / "step-000010" / "folder").is_symlink()


def test_a_link_is_no_checkpoint_and_one_in_the_place_of_a_save_is_not_followed(tmp_path):
    root, other = tmp_path / "checkpoints", tmp_path / "other"
    save(other, 10)
    root.mkdir()
    (root / "step-000010").symlink_to(other / "step-000010")
    (root / ".step-000010.tmp").symlink_to(other)
    found: list[str] = []
    assert newest_valid(root, found.append) is None and "it is a link" in found[0]
    save(root, 10)
    assert newest_valid(root, found.append) is not None
    assert (root / "step-000010.damaged").is_symlink()
    assert [path.name for path in other.iterdir()] == ["step-000010"] and problem_with(other / "step-000010") is None


def test_same_weights_give_the_same_bytes(tmp_path):
    save(tmp_path / "a", 10)
    save(tmp_path / "b", 10)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def scored(root: Path, step: int, score: float | None) -> None:
    state = {} if score is None else {SCORE: {"eval/loss": score}}
    save_checkpoint(root, step, lambda directory: (directory / "weights").write_text(str(step)), state)


def test_the_best_is_the_one_with_the_best_score_and_the_earliest_of_equals(tmp_path):
    for step, score in ((1, 0.2), (2, None), (3, 0.5), (4, 0.5), (5, 0.4)):
        scored(tmp_path, step, score)
    assert best_scored(tmp_path, 5, "eval/loss", lowest=False).step == 3
    assert best_scored(tmp_path, 5, "eval/loss", lowest=True).step == 1
    assert best_scored(tmp_path, 2, "eval/loss", lowest=False).step == 1
    assert best_scored(tmp_path, 0, "eval/loss", lowest=False) is None
    assert best_scored(tmp_path, 5, "eval/accuracy", lowest=False) is None


def test_a_score_that_came_after_its_checkpoint_counts_and_goes_with_it(tmp_path):
    for step, score in ((1, 0.2), (2, None), (3, 0.4)):
        scored(tmp_path, step, score)
    (tmp_path / "step-000002" / LATE_SCORE).write_text('{"eval/loss": 0.5}')
    best = best_scored(tmp_path, 3, "eval/loss", lowest=False)
    assert best is not None and best.step == 2 and best.state[SCORE] == {"eval/loss": 0.5}
    prune(tmp_path, 3, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003"]


def test_a_link_to_the_checkpoint_of_another_run_is_not_the_best(tmp_path):
    root, other = tmp_path / "checkpoints", tmp_path / "other"
    save_checkpoint(root, 20, write_weights(), {SCORE: {"eval/accuracy": 0.5}})
    save_checkpoint(other, 10, write_weights(), {SCORE: {"eval/accuracy": 0.9}})
    (root / "step-000010").symlink_to(other / "step-000010")
    best = best_scored(root, 20, "eval/accuracy", lowest=False)
    assert best is not None and best.step == 20


def test_the_best_is_kept_beside_the_newest(tmp_path):
    for step, score in ((1, 0.2), (2, 0.5), (3, 0.3), (4, 0.1)):
        scored(tmp_path, step, score)
        prune(tmp_path, step, 1, best_scored(tmp_path, step, "eval/loss", lowest=False))
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4, 2]
