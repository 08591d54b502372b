"""Files under the names of a recipe whose content has changed when a run resumes."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.tiny_models import noise_image
from tests.training.test_loops import sft_recipe, write_rows
from tiercel.data.reading import read_run_rows
from tiercel.errors import RunError
from tiercel.log import printed
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.training.run_content import NAMED, content_of, require_content_of

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def main_at(tmp_path, monkeypatch):
    """Let `main` of lab/model in the hub's cache stand at a commit, with weights of that number."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--lab--model"

    def move(number: int, weights: str | None = None) -> None:
        place = repository / "snapshots" / COMMITS[number]
        for file, text in ((place / "config.json", "{}"), (place / "model.safetensors", weights or str(number))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(COMMITS[number])

    return move


def content(recipe) -> dict:
    return content_of(recipe, read_run_rows(recipe.data, recipe.purpose), lambda: None)


def told(before: dict, now: dict) -> list[str]:
    said: list[str] = []
    found = FoundCheckpoint(step=2, path=Path("run/checkpoints/step-000002"), state={NAMED: before})
    with printed(said.append):
        require_content_of(found, now)
    return said


def test_a_model_of_the_hub_that_moved_is_refused_and_goes_on_at_its_commit(tmp_path, main_at):
    rows = write_rows(tmp_path)
    recipe = sft_recipe(Path("lab/model"), rows, tmp_path / "run")
    main_at(0)
    before = content(recipe)
    assert told(before, content(recipe)) == []
    main_at(1)
    with pytest.raises(
        RunError, match=rf"model\.path: the files of lab/model .*step-000002.*model\.revision: {COMMITS[0]}"
    ):
        told(before, content(recipe))
    pinned = sft_recipe(Path("lab/model"), rows, tmp_path / "run", model={"revision": COMMITS[0]})
    assert told(before, content(pinned)) == []
    main_at(1, weights="0")  # another README, for example
    assert told(before, content(recipe)) == []


def test_files_of_a_cache_without_commits_are_put_back(tmp_path, main_at, monkeypatch):
    recipe = sft_recipe(Path("lab/model"), write_rows(tmp_path), tmp_path / "run")
    monkeypatch.setattr("tiercel.training.run_content.resolve", lambda source, key: tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "config.json").write_text("{}")
    before = content(recipe)
    (tmp_path / "cache" / "config.json").write_text("[]")
    with pytest.raises(RunError, match="restore the earlier files"):
        told(before, content(recipe))


def test_other_pictures_and_held_out_rows_are_told(tmp_path):
    rows = write_rows(tmp_path)
    (tmp_path / "held").mkdir()
    held = write_rows(tmp_path / "held", count=3)
    recipe = sft_recipe(tmp_path, rows, tmp_path / "run", data={"eval": str(held)})
    before = content(recipe)
    assert before["models"] == {} and told(before, content(recipe)) == [] == told({}, content(recipe))
    noise_image(56, 60, seed=99).save(tmp_path / "1-0.png")
    (line,) = told(before, content(recipe))
    assert line.startswith("data.train: pictures") and "step-000002" in line
    before = content(recipe)
    held.write_text(held.read_text().replace("[1, 2]", "[2, 1]"))
    noise_image(56, 60, seed=99).save(tmp_path / "held" / "1-0.png")
    assert [line.split(" ")[:2] for line in told(before, content(recipe))] == [
        ["data.eval:", "pictures"],
        ["data.eval:", "the"],
    ]
