"""The reward `model` with a reward model of tiercel's own, against transformers written out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.packing.test_examples import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, noise_image, tiny_policy
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.config.schema import Data, Reliability
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_training_rows
from tiercel.errors import RecipeError
from tiercel.models.layers.value_head import add_value_head
from tiercel.models.policy import WHOLE_FILE
from tiercel.models.prompts import encode_conversation
from tiercel.models.weights.saving import save_adapter
from tiercel.packing.examples import conversation_item
from tiercel.rewards.external import ByModel
from tiercel.rewards.runtime.model import ModelReward
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.runs.directory import read_metrics
from tiercel.types import Completion, Group, ImageRoots, Message, VideoSource

TEXTS = ("7", "[1, 2]", " is the seven [3, 4]")


@pytest.fixture
def rows(tmp_path):
    """One row without a picture, one with one, one with two, and their data section."""
    data = Data(train=str(write_rows(tmp_path, 3)))
    return read_training_rows(data, "grpo").rows, data


def save_value_adapter(policy, directory: Path) -> Path:
    add_value_head(policy.model)
    head = policy.model.value_head.weight
    head.data.normal_(generator=torch.Generator().manual_seed(2)).mul_(10)
    head.requires_grad_(True)
    save_adapter(policy, directory)
    return directory


def entry(checkpoint: Path, **options) -> ByModel:
    return ByModel.model_validate(
        {"name": "model", "model": {"path": str(checkpoint), "dtype": "float32", "max_tokens": 400, **options}}
    )


def group(prompt, texts=TEXTS) -> Group:
    completions = [
        Completion(token_ids_L=torch.tensor([1]), logprobs_L=torch.zeros(1), text=text, is_truncated=False, seed=0)
        for text in texts
    ]
    return Group(prompt=prompt, completions=tuple(completions), policy_version=0)


def scores(reward: ByModel, groups) -> list[float]:
    with Scorer([reward], Reliability(), "unit") as scorer:
        scored = scorer.score(groups)
    return [each.rewards["model"] for one in scored for each in one.completions]


def plain_value(policy, prompt, text) -> float:
    """The value by transformers' own pass over the row's turns and the answer, one at a time."""
    answered = replace(prompt.row, messages=(*prompt.row.messages[:-1], Message(role="assistant", content=text)))
    each = encode_conversation(policy.family, answered, 0, prompt.images, system=None, max_prompt_tokens=400)
    ids = torch.cat([each.prompt.token_ids_P, each.token_ids_L])
    states = []
    hook = policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0]))
    number = int(prompt.row.id.rpartition("-")[2])
    shown = [noise_image(56 + 28 * place, 60, seed=number * 3 + place) for place in range(number % 3)]
    with torch.no_grad():
        policy.model(**huggingface_inputs(policy.family, conversation_item(each).prompt, ids, shown))
    hook.remove()
    return float(states[0][0, -2] @ policy.model.value_head.weight)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_values_are_those_of_plain_passes_with_pictures(tiny_checkpoints, tmp_path, rows, name):
    table, data = rows
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    adapter = save_value_adapter(policy, tmp_path / "adapter")
    encode = prompt_encoder(policy.family, data)
    prompts = [encode(row, index) for index, row in enumerate(table)]
    found = scores(entry(tiny_checkpoints[name], adapter=str(adapter), batch_tokens=800), [group(p) for p in prompts])
    expected = [plain_value(policy, prompt, text) for prompt in prompts for text in TEXTS]
    assert [value.value for value in found] == pytest.approx(expected, abs=1e-3, rel=1e-4)
    assert len({round(value, 4) for value in expected}) == len(expected)


def test_rows_of_one_id_in_two_files_have_the_values_of_their_own_pictures(tiny_checkpoints, tmp_path, rows):
    table, data = rows
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)
    reward = entry(tiny_checkpoints["qwen2_5_vl"], adapter=str(save_value_adapter(policy, tmp_path / "adapter")))
    (tmp_path / "other").mkdir()
    noise_image(56, 60, seed=77).save(tmp_path / "other" / table[1].images[0].path)
    other = replace(table[1], image_roots=ImageRoots(base=str(tmp_path / "other")))
    encode = prompt_encoder(policy.family, data)
    groups = [group(encode(row, index), ("7",)) for index, row in enumerate((table[1], other))]
    alone = [scores(reward, [each])[0].value for each in groups]
    assert [each.value for each in scores(reward, groups)] == pytest.approx(alone, abs=1e-4)
    assert abs(alone[0] - alone[1]) > 1e-3


def test_what_cannot_be_encoded_is_a_failure_and_the_others_have_values(tiny_checkpoints, tmp_path, rows):
    table, data = rows
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    policy = tiny_policy(checkpoint, noise=0.1)
    adapter = save_value_adapter(policy, tmp_path / "adapter")
    prompt = prompt_encoder(policy.family, data)(table[1], 0)
    reward = entry(checkpoint, adapter=str(adapter))
    good, marked, long = scores(reward, [group(prompt, ("7", "<image>", "7 " * 500))])
    assert good.value is not None and good.failure is None
    assert marked.value is None and "row row-1" in marked.failure
    assert long.value is None and "400" in long.failure
    film = replace(
        prompt.row,
        images=(),
        videos=(VideoSource(path="film.mp4"),),
        messages=(Message(role="user", content="<video>what?"),),
    )
    (refused,) = scores(reward, [group(replace(prompt, row=film), ("7",))])
    assert "does not accept videos" in refused.failure


def test_checkpoints_without_a_value_head_are_refused(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    policy = tiny_policy(checkpoint, noise=0.1)
    save_adapter(policy, tmp_path / "plain")

    def refused(words: str, **options) -> None:
        with pytest.raises(RecipeError, match=words):
            ModelReward(entry(checkpoint, **options)).start()

    refused("has no value head; use a model that `tiercel reward` trained", adapter=str(tmp_path / "plain"))
    valued = save_value_adapter(policy, tmp_path / "valued")
    refused("label: is 1", adapter=str(valued), label=1)
    tensors = load_file(valued / WHOLE_FILE)
    save_file({"value_head.weight": tensors["value_head.weight"][:3]}, valued / WHOLE_FILE)
    refused("this model has no weight value_head.weight of shape", adapter=str(valued))


def test_a_grpo_run_takes_its_reward_from_it(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    adapter = save_value_adapter(tiny_policy(checkpoint, noise=0.1), tmp_path / "adapter")
    model = {"path": str(checkpoint), "adapter": str(adapter), "dtype": "float32"}
    run = run_grpo(
        grpo_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", rewards=[{"name": "model", "model": model}])
    )
    rows = read_metrics(run)
    assert all(row["reward/std"] > 0 for row in rows[1:])
