"""What the kept logprobs of the reference belong to: rows, pictures, and the adapter that the run starts from."""

import json
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_models import noise_image
from tiercel.config.schema import DpoRecipe
from tiercel.data.reading import read_training_rows
from tiercel.distributed.ranks import ALONE
from tiercel.errors import TrainingError
from tiercel.training.offline.precomputed import ReferenceCache, _identity

TURNS = [{"role": "user", "content": "<image>Where is it?"}, {"role": "assistant", "content": "At <bbox>."}]
PAIR = {
    "id": "one",
    "images": ["a.png"],
    "rejected_images": ["b.png"],
    "boxes": [[1, 2, 3, 4]],
    "messages": TURNS,
    "rejected": "At [<bbox>].",
}


@pytest.fixture
def identity(tmp_path):
    """The identity of a run on one pair, with changes of its record."""
    noise_image(40, 40, seed=0).save(tmp_path / "a.png")
    noise_image(40, 40, seed=0).save(tmp_path / "b.png")
    start = tmp_path / "start"
    start.mkdir()
    (start / "adapter_config.json").write_text("{}")
    (start / "adapter_model.safetensors").write_bytes(b"1")
    file = tmp_path / "rows.jsonl"
    recipe = DpoRecipe.model_validate(
        {
            "model": {"path": "base"},
            "lora": {"init": str(start)},
            "data": {"train": str(file)},
            "dpo": {"loss": "sigmoid"},
            "train": {"steps": 1},
            "output": "run",
        }
    )

    def of(data: Mapping[str, Any] = MappingProxyType({}), **changes) -> str:
        file.write_text(json.dumps({**PAIR, **changes}))
        chosen = recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})
        return _identity(chosen, {"train": read_training_rows(chosen.data, "pairs")}, lambda: None)

    return of


def test_the_same_run_has_the_same_identity_wherever_its_pictures_were_copied_from(identity, tmp_path):
    before = identity()
    (tmp_path / "a.png").write_bytes((tmp_path / "b.png").read_bytes())  # another time, the same bytes
    assert identity() == before


@pytest.mark.parametrize(
    "changes",
    (
        {"images": ["b.png"]},
        {"boxes": [[1, 2, 3, 5]]},
        {"rejected_images": ["a.png"]},
        {"rejected": "At <bbox>"},
        {"max_pixels": 3136},
        {"source": "mine"},
    ),
)
def test_another_row_is_another_identity(identity, changes):
    assert identity(**changes) != identity()


def test_another_picture_of_the_same_name_is_another_identity(identity, tmp_path):
    found = [identity()]
    for name in ("a.png", "b.png"):  # of the chosen side, of the rejected side
        noise_image(40, 40, seed=1).save(tmp_path / name)
        found.append(identity())
    (tmp_path / "b.png").unlink()  # such a row is left out when its picture is decoded
    found.append(identity())
    assert len(set(found)) == 4


def test_frames_and_films_are_pictures_too(identity, tmp_path):
    shown = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "This."}]
    for videos in (["c.mp4"], [["c.mp4", "c.mp4"]]):
        row = {
            "images": None,
            "rejected_images": None,
            "boxes": None,
            "messages": shown,
            "rejected": "That.",
            "videos": videos,
        }
        (tmp_path / "c.mp4").write_bytes(b"1")
        before = identity(**row)
        (tmp_path / "c.mp4").write_bytes(b"2")
        assert identity(**row) != before


def test_another_adapter_at_the_same_place_is_another_identity(identity, tmp_path):
    before = identity()
    (tmp_path / "start" / "adapter_model.safetensors").write_bytes(b"2")
    assert identity() != before


def test_another_text_of_the_template_is_another_identity(identity, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("A {{ messages }}")
    before = identity({"template": str(template)})
    template.write_text("B {{ messages }}")
    assert identity({"template": str(template)}) != before


def test_what_a_run_may_change_or_write_otherwise_keeps_the_identity(identity, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = identity()
    assert identity({"workers": 0, "image_root": str(tmp_path), "train": "rows.jsonl"}) == before
    assert identity({"system": "Another."}) != before


def test_a_row_without_a_reference_is_named():
    cache = ReferenceCache(train={0: torch.zeros(2)})
    prompts = [SimpleNamespace(index=index, row=SimpleNamespace(id=f"row-{index}")) for index in (0, 1)]
    groups = [SimpleNamespace(examples=[SimpleNamespace(prompt=prompt)]) for prompt in prompts]
    order = SimpleNamespace(row=lambda index: index)
    assert cache.of(groups[:1], order, ALONE).keys() == {0}
    with pytest.raises(TrainingError, match="row-1"):
        cache.of(groups, order, ALONE)
