"""`lora.init` may name a run: its newest adapter is chosen once, and kept while the new run continues."""

from pathlib import Path

import pytest

from tests.runs.test_directory import make_a_step, sft_recipe
from tiercel.config import load_recipe
from tiercel.config.schema import Lora
from tiercel.errors import RecipeError
from tiercel.runs.adapters import starting_adapter
from tiercel.runs.checkpoints import save_checkpoint
from tiercel.runs.directory import open_run


@pytest.fixture
def first(tmp_path) -> Path:
    """A run with adapters of two steps."""
    make_a_step(sft_recipe(tmp_path / "first", lora=Lora(rank=4)))
    save(tmp_path / "first", 1)
    save(tmp_path / "first", 2)
    return tmp_path / "first"


def save(run: Path, step: int, name: str = "adapter") -> None:
    save_checkpoint(run / "checkpoints", step, lambda place: (place / name).mkdir(), {})


def second(first: Path | str):
    return sft_recipe(first.parent / "second", lora=Lora(rank=4, init=str(first)))


def init_of(recipe) -> str:
    return starting_adapter(recipe).lora.init


def test_the_newest_valid_adapter_of_a_run_is_taken(first):
    assert init_of(second(first)) == str(first / "checkpoints/step-000002/adapter")
    (first / "checkpoints/step-000002/state.json").write_text("damaged")
    assert init_of(second(first)) == str(first / "checkpoints/step-000001/adapter")


def test_an_adapters_directory_and_no_adapter_stay_as_they_are(first):
    directory = first / "checkpoints/step-000001/adapter"
    assert init_of(second(first).model_copy(update={"lora": Lora(rank=4, init=str(directory))})) == str(directory)
    assert starting_adapter(sft_recipe(first.parent / "x", lora=None)).lora is None
    assert init_of(sft_recipe(first.parent / "x", lora=Lora())) is None


def test_a_run_that_goes_on_keeps_the_adapter_that_it_began_with(first):
    with open_run(starting_adapter(second(first))) as run:
        run.record({"step": 1, "loss": 0.5})
    save(first, 3)
    assert init_of(second(first)) == str(first / "checkpoints/step-000002/adapter")
    with open_run(starting_adapter(second(first))) as run:
        assert run.changed == ()


def test_one_that_finished_no_step_takes_the_newest(first):
    with open_run(starting_adapter(second(first))):
        pass
    save(first, 3)
    assert init_of(second(first)) == str(first / "checkpoints/step-000003/adapter")


def test_a_run_without_an_adapter_is_refused(first):
    for folder in (first / "checkpoints").iterdir():
        folder.rename(first / folder.name)
    with pytest.raises(RecipeError, match="without a valid checkpoint yet"):
        starting_adapter(second(first))
    save(first, 4, "model")
    with pytest.raises(RecipeError, match=r"full fine-tuning.*export .* --merge.*model\.path"):
        starting_adapter(second(first))


def test_a_recipe_file_may_name_a_run(first, monkeypatch):
    monkeypatch.chdir(first.parent)
    Path("rows.jsonl").write_text("{}\n")
    text = "model: {path: a/b}\nlora: {init: first}\ndata: {train: rows.jsonl}\ntrain: {steps: 1}\noutput: second\n"
    Path("recipe.yaml").write_text(text)
    assert init_of(load_recipe("sft", Path("recipe.yaml"))) == "first/checkpoints/step-000002/adapter"
