"""Causal language models without pictures, on tiny random checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.generic_models import GENERIC, save_generic_checkpoint
from tests.tiny_models import make_row, noise_image, tiny_policy
from tiercel.algorithms.preference_sections import Ranking
from tiercel.config.schema import Data, Lora, Model, RewardRecipe, Train
from tiercel.errors import DataError, ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.families.text_only import TextOnly
from tiercel.models.prompts import encode_conversation, encode_prompt
from tiercel.models.rendering import render
from tiercel.packing.forward_equivalence_check import check_forward_equivalence
from tiercel.training.trainer import build_trainer
from tiercel.types import Message

SHARED = ("qwen3", "llama", "mistral", "gemma", "olmo2", "gemma3_text", "mistral_sliding", "mixtral", "qwen3_moe")
REFUSED = {"granite": "logprobs differ from its own forward pass", "phi": "its head has a bias"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("text_only")
    return {name: save_generic_checkpoint(GENERIC[name], root / name) for name in (*SHARED, *REFUSED)}


@pytest.mark.parametrize("name", SHARED)
def test_a_decoder_with_attention_shares_prompts(checkpoints, name):
    policy = tiny_policy(checkpoints[name], noise=0.1)
    assert isinstance(policy.family, TextOnly)
    found = check_forward_equivalence(policy)
    assert found.obstacle is None and found.difference < 1e-5


def test_a_reward_model_is_proved_by_its_logprobs(checkpoints, tmp_path):
    recipe = RewardRecipe(
        model=Model(path=str(checkpoints["qwen3"]), dtype="float32"),
        lora=Lora(rank=2),
        data=Data(train="rows.jsonl"),
        ranking=Ranking(),
        train=Train(steps=1),
        output=str(tmp_path / "run"),
    )
    assert build_trainer(recipe).policy.family.unshared is None


def test_weights_that_wait_on_the_cpu_for_their_gpus_are_proved_there(checkpoints):
    """fsdp2 and deepspeed load them so."""
    policy = tiny_policy(checkpoints["qwen3"], noise=0.1, dtype="bfloat16")
    assert check_forward_equivalence(replace(policy, device=torch.device("cuda"))).obstacle is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_does_more_than_one_product_is_refused(checkpoints, name):
    with pytest.raises(ModelError, match=REFUSED[name]):
        check_forward_equivalence(tiny_policy(checkpoints[name]))


@pytest.mark.parametrize("name", SHARED)
def test_ids_equal_the_tokenizers_own(checkpoints, name):
    family = load_family(Model(path=str(checkpoints[name])))
    row = make_row("row", "Where is the seven?", 0)
    prompt = encode_prompt(family, row, 0, [], system="seven", max_prompt_tokens=99)
    template = (
        "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"  # as text-only ones do
    )
    own = family.tokenizer.apply_chat_template(
        [{"role": "system", "content": "seven"}, {"role": "user", "content": "Where is the seven?"}],
        chat_template=template,
    )
    object.__setattr__(family.checkpoint, "chat_template", template)
    text = render(family, prompt.messages, add_generation_prompt=True)
    assert family.tokenizer(text, add_special_tokens=False)["input_ids"] == list(own["input_ids"])


def test_a_picture_is_refused_by_the_models_name(checkpoints):
    family = load_family(Model(path=str(checkpoints["qwen3"])))
    for refuse in (lambda: family.plan_image((56, 56)), lambda: family.encode_image(noise_image(56, 56, 1))):
        with pytest.raises(
            DataError, match=r"qwen3 \(qwen3\) is a text-only model and does not read pictures"
        ) as error:
            refuse()
        assert error.value.field == "images"
    message = Message(role="user", content="<image>Where")
    with pytest.raises(DataError, match="is a text-only model and does not read pictures"):
        render(family, [message], add_generation_prompt=True)


def test_sft_scores_the_answer_and_its_end(checkpoints):
    family = load_family(Model(path=str(checkpoints["llama"])))
    conversation = encode_conversation(family, make_row("row", "Where?", 0), 0, [], system=None, max_prompt_tokens=99)
    scored = conversation.token_ids_L[conversation.is_scored_L]
    assert family.tokenizer.decode(scored.tolist()) == "[1, 20, 30, 40]<|im_end|>"


def test_a_model_without_pictures_takes_no_coordinates(checkpoints):
    with pytest.raises(ModelError, match=r"data\.coordinates: is unit, but text_only does not read pictures;"):
        load_family(Model(path=str(checkpoints["llama"])), coordinates="unit")


def test_full_fine_tuning_needs_no_change_of_freeze(checkpoints):
    """The recipe freezes the tower by default, and there is none."""
    policy = tiny_policy(checkpoints["llama"], lora=None)
    assert len(policy.trained_parameters()) == len(list(policy.model.parameters()))
    assert check_forward_equivalence(policy).difference < 1e-5
    assert torch.equal(policy.family.is_placeholder(torch.arange(5)), torch.zeros(5, dtype=torch.bool))
