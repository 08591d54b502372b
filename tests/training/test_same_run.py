"""A run resumes from its own data: other rows under the same ids are reported, and checkpoints of another run
refused."""

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_models import noise_image
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.errors import RunError
from tiercel.runs.checkpoints import directory_of
from tiercel.runs.files import file_sha256


@pytest.fixture
def recipe_of(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)

    def make(name: str, steps: int, heldout: int = 0, **optim: float):
        data = {"eval": {"count": heldout} if heldout else None, "workers": 0}
        train = {"steps": steps, "save_every": 1, "keep": 9}
        return grpo_recipe(
            tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / name, data=data, train=train, optim={"lr": 1e-2, **optim}
        )

    return make


@pytest.mark.catalogue
def test_a_run_goes_on_from_its_own(recipe_of, tmp_path):
    first, other = run_grpo(recipe_of("first", 1)), run_grpo(recipe_of("other", 2, lr=2e-2))
    same = run_grpo(recipe_of("same", 1))
    assert (directory_of(same / "checkpoints", 1) / "state.json").read_bytes() == (
        directory_of(first / "checkpoints", 1) / "state.json"
    ).read_bytes()

    foreign = directory_of(first / "checkpoints", 2)
    shutil.copytree(directory_of(other / "checkpoints", 2), foreign)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match=f"{foreign} belongs to another run, .*lora.init: {foreign}/adapter"):
        run_grpo(recipe_of("first", 3))
    kept = {path: text for path, text in before.items() if path.suffix == ".safetensors" or "metrics" in path.name}
    assert all(path.read_bytes() == text for path, text in kept.items())

    shutil.rmtree(foreign)
    rows = Path(recipe_of("first", 3).data.train)
    rows.write_text(rows.read_text().replace('"answer": "', '"answer": "not '))
    run_grpo(recipe_of("first", 3))
    log = (first / "log.txt").read_text()
    assert "data.train: the texts, answers or columns of rows have changed since" in log
    assert "going on from step 1" in log
    assert "pictures with the same names" not in log
    noise_image(56, 60, seed=99).save(rows.parent / "1-0.png")
    run_grpo(recipe_of("first", 4))
    log = (first / "log.txt").read_text()
    assert log.count("the texts") == 1 == log.count("data.train: pictures with the same names have changed since")


def test_a_checkpoint_that_says_in_another_way_what_rows_say_is_that_of_the_run(recipe_of):
    run = run_grpo(recipe_of("run", 1, heldout=1))
    state = directory_of(run / "checkpoints", 1) / "state.json"
    written = json.loads(state.read_text())
    identities = [written["rows"], written["content"]["rows"]["data.eval"]]
    for identity in identities:
        identity["content"] = identity.pop("said")  # as until the index had a hash for each row
    state.write_text(json.dumps(written, indent=1, sort_keys=True))
    manifest = state.with_name("MANIFEST.json")
    hashes = json.loads(manifest.read_text())
    hashes["sha256"]["state.json"] = file_sha256(state)
    manifest.write_text(json.dumps(hashes))
    run_grpo(recipe_of("run", 2, heldout=1))
    log = (run / "log.txt").read_text()
    assert "going on from step 1" in log and "have changed" not in log
