"""Which keys may change between the starts of a run, and which spellings are the same place."""

import json
import re
from pathlib import Path

import pytest

from tests.runs.test_directory import grpo_recipe, make, make_a_step, sft_recipe
from tiercel.config.keys import every_key
from tiercel.config.schema import Data, Learner, Lora, Model, Optim, Reliability, Train
from tiercel.errors import RunError
from tiercel.runs.directory import open_run
from tiercel.runs.identity import MAY_DIFFER, ROUNDED

PAGE = Path(__file__).parent.parent.parent / "docs/troubleshooting.md"
WHOLE = {"reliability": Reliability.model_fields, "learner": Learner.model_fields}


def test_the_page_lists_them_all():
    text = PAGE.read_text(encoding="utf-8").split("what may change between two starts")[1].split("\n### ")[0]
    table = "".join(line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("| "))
    said = [word for word in re.findall(r"`([^`]+)`", table) if word != "keys"]
    whole = [f"{section}.{key}" for section in said if section in WHOLE for key in WHOLE[section]]
    assert sorted({*whole, *said} - WHOLE.keys()) == sorted(MAY_DIFFER)
    rounding = next(line for line in text.splitlines() if "other rounding" in line)
    assert {key for key in MAY_DIFFER if f"`{key}`" in rounding or key.startswith("learner.")} == set(ROUNDED)


def test_each_is_a_key():
    assert set(MAY_DIFFER) <= {key.path for key in every_key()}


def lines_of(recipe) -> tuple[str, ...]:
    with open_run(recipe) as run:
        return run.changed


def test_a_remedy_for_memory_is_told_with_what_it_changes(tmp_path):
    make_a_step(grpo_recipe(tmp_path))
    learner = Learner(max_tokens_per_microbatch=8192, gradient_checkpointing="full")
    assert lines_of(grpo_recipe(tmp_path, learner=learner)) == (
        "the recipe has changed: learner.gradient_checkpointing: was False, is 'full' now",
        "the recipe has changed: learner.max_tokens_per_microbatch: was 16384, is 8192 now",
        "from here on, sums are computed in another order; results differ only by rounding",
    )
    assert lines_of(grpo_recipe(tmp_path, learner=learner)) == ()


def test_what_keeps_every_byte_is_told_without_a_word_on_rounding(tmp_path):
    make_a_step(sft_recipe(tmp_path))
    model = Model(path="m", vision_cache_bytes=10)
    assert lines_of(sft_recipe(tmp_path, model=model, data=Data(train="rows.jsonl", workers=0))) == (
        "the recipe has changed: data.workers: was 2, is 0 now",
        "the recipe has changed: model.vision_cache_bytes: was 0, is 10 now",
    )


@pytest.mark.parametrize(("schedule", "is_told"), [("cosine", True), ("constant", False)])
def test_a_schedule_that_ends_elsewhere_is_told(tmp_path, schedule, is_told):
    """As transformers 34053 and others report: the rate of a cosine jumps if the run is made longer."""
    optim = Optim(schedule=schedule)
    make_a_step(sft_recipe(tmp_path, optim=optim))
    longer = sft_recipe(tmp_path, optim=optim, train=Train(steps=4000))
    told = [line for line in lines_of(longer) if line.startswith("optim.schedule: cosine ends with the run")]
    assert bool(told) == is_told


def test_with_dropout_other_masks_are_told(tmp_path):
    lora = Lora(rank=8, dropout=0.1)
    make_a_step(sft_recipe(tmp_path, lora=lora))
    told = lines_of(sft_recipe(tmp_path, lora=lora, learner=Learner(max_tokens_per_microbatch=8192)))
    assert "lora.dropout" in told[-1]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"train": "data/rows.jsonl"}, {"train": "{here}/data/rows.jsonl"}),
        ({"train": "data/rows.jsonl"}, {"train": "data/rows.jsonl", "image_root": "data"}),
        ({"train": "data/rows.jsonl", "image_root": "pictures"}, {"train": "data/rows.jsonl", "image_root": "link"}),
        ({"train": "data/rows.jsonl"}, {"train": ["./data/rows.jsonl"], "image_root": "data"}),
        ({"train": "./data/rows.jsonl"}, {"train": "data/../data/rows.jsonl", "image_root": "{here}/data"}),
    ],
)
def test_a_place_may_be_written_otherwise(tmp_path, monkeypatch, before, now):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("pictures")
    make_a_step(grpo_recipe(Path("run"), data=Data(**before)))
    written = json.loads(json.dumps(now).replace("{here}", str(tmp_path)))
    assert lines_of(grpo_recipe(Path("run"), data=Data(**written))) == ()


@pytest.mark.parametrize(
    ("data", "key"),
    [
        (Data(train="other/rows.jsonl"), "data.train"),
        (Data(train=["rows.jsonl", "more.jsonl"]), "data.train"),
        (Data(train="rows.jsonl", image_root="elsewhere"), "data.image_root"),
        (Data(train="rows.jsonl", system="./a"), "data.system"),
        (Data(train="rows.jsonl", max_image_pixels=10), "data.max_image_pixels"),
    ],
)
def test_another_place_or_text_is_refused(tmp_path, data, key):
    make_a_step(grpo_recipe(tmp_path, data=Data(train="rows.jsonl", system="a")))
    with pytest.raises(RunError, match=key):
        make(grpo_recipe(tmp_path, data=data.model_copy(update={"system": data.system or "a"})))


def test_a_revision_may_be_written_where_none_was_and_no_other(tmp_path):
    make_a_step(sft_recipe(tmp_path, model=Model(path="lab/model")))
    pinned, other = (Model(path="lab/model", revision=letter * 40) for letter in "ab")
    assert lines_of(sft_recipe(tmp_path, model=pinned)) == (
        f"the recipe has changed: model.revision: was None, is {'a' * 40!r} now",
    )
    for model in (other, Model(path="lab/model")):
        with pytest.raises(RunError, match=r"model\.revision"):
            lines_of(sft_recipe(tmp_path, model=model))
