"""Rotary embeddings whose frequencies depend on the longest row of a pass, on tiny random checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.generic_models import TEXT_KEYS, Tiny, save_generic_checkpoint
from tests.tiny_models import tiny_recipe
from tests.training.test_loops import grpo_recipe
from tiercel.algorithms.preference_sections import Kto
from tiercel.config.schema import BaseRecipe, KtoRecipe, Model
from tiercel.errors import ModelError
from tiercel.models.families.loading import family_of, load_family
from tiercel.models.layers.rotary import steady_length
from tiercel.models.weights.loading import load_weights
from tiercel.rewards.external import RewardModel
from tiercel.rewards.runtime.values import load_value_model

LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
PHI = Tiny(
    model="Phi3ForCausalLM",
    config="Phi3Config",
    keys=TEXT_KEYS | {"original_max_position_embeddings": 64, "rope_parameters": LONG},
)


@pytest.fixture(scope="module")
def phi(tmp_path_factory) -> Path:
    return save_generic_checkpoint(PHI, tmp_path_factory.mktemp("rotary") / "phi")


@pytest.fixture
def dynamic(tiny_checkpoints, tmp_path) -> Path:
    """InternVL3 as it is published: a decoder of Qwen2.5 with dynamic scaling. Its longest row has 512 tokens."""
    place = Path(shutil.copytree(tiny_checkpoints["internvl"], tmp_path / "dynamic"))
    config = json.loads((place / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (place / "config.json").write_text(json.dumps(config))
    return place


def rows_of(checkpoint: Path, tokens: int) -> BaseRecipe:
    return tiny_recipe(checkpoint).with_values({"data.max_prompt_tokens": tokens})


def test_rows_of_the_steady_length_are_taken(phi, dynamic):
    for checkpoint, kind, limit in ((phi, "longrope", 64), (dynamic, "dynamic", 512)):
        family = family_of(rows_of(checkpoint, limit))
        assert steady_length(family.checkpoint.config.get_text_config()) == (limit, kind)
        words = (
            rf"^data.max_prompt_tokens: rows of up to {limit + 1} tokens are allowed, .* has more than {limit}, "
            rf".*rope_type is {kind}.*; allow at most {limit}$"
        )
        with pytest.raises(ModelError, match=words):
            family_of(rows_of(checkpoint, limit + 1))


def test_completions_count_too(phi, tmp_path):
    def recipe(tokens: int):
        changes = {"data": {"max_prompt_tokens": 60}, "rollout": {"max_new_tokens": tokens}}
        return grpo_recipe(phi, tmp_path / "rows.jsonl", tmp_path / "run", **changes)

    assert family_of(recipe(4)).name == "text_only"
    words = r"^data.max_prompt_tokens and rollout.max_new_tokens together: rows of up to 65 tokens"
    with pytest.raises(ModelError, match=words):
        family_of(recipe(5))


def test_a_borrowed_answer_counts_too(phi):
    plain = rows_of(phi, 33)
    labelled = KtoRecipe(model=plain.model, data=plain.data, train=plain.train, output="run", kto=Kto())
    with pytest.raises(ModelError, match="rows of up to 66 tokens"):
        family_of(labelled)
    assert family_of(labelled.with_values({"data.max_prompt_tokens": 32}))


def test_a_reward_model_reads_no_longer_rows(phi):
    with pytest.raises(ModelError, match=r"^model.max_tokens: rows of up to 65 tokens are allowed"):
        load_value_model(RewardModel(path=str(phi), adapter="unread", max_tokens=65), phi)


def test_usual_positions_have_no_such_length(tiny_checkpoints):
    for checkpoint in tiny_checkpoints.values():
        assert steady_length(load_family(Model(path=str(checkpoint))).checkpoint.config.get_text_config()) is None


def test_dynamic_frequencies_keep_their_numbers(dynamic):
    plain = AutoModelForImageTextToText.from_pretrained(dynamic, dtype=torch.float32)
    assert plain.model.language_model.rotary_emb.rope_type == "dynamic"
    ours = load_weights(load_family(Model(path=str(dynamic))), torch.float32, torch.device("cpu"))
    ids = torch.randint(200, (1, 512), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_dynamic_frequencies_do_not_look_at_the_positions(dynamic):
    """A tensor without values cannot decide a branch."""
    family = load_family(Model(path=str(dynamic)))
    model = load_weights(family, torch.float32, torch.device("meta"))
    positions = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    cosines, _ = family.language_model(model).rotary_emb(torch.zeros(1, 4, 64, device="meta"), positions)
    assert cosines.shape == (1, 4, 16)
