"""What the trainer and a real engine must agree on: adapter, gradient, unchanged base weights."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.worker import keep_gradients
from tests.vllm.servers import ENVIRONMENT, KEY
from tests.vllm.test_runs import by_server
from tiercel.config import load_recipe
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_rows
from tiercel.errors import EnvironmentProblem
from tiercel.packing.batch import advantage_groups
from tiercel.rollout.sampler import greedy_params, sampling_params
from tiercel.runs.directory import open_run
from tiercel.runs.publishing import WEIGHTS, Publisher
from tiercel.training.grpo import loop as grpo
from tiercel.training.grpo.advantages import step_advantages
from tiercel.training.grpo.minibatch_updates import learn
from tiercel.training.grpo.policy_sync import open_sampler
from tiercel.training.trainer import build_trainer
from tiercel.types import Completion, Group, ScoredCompletion, ScoredGroup

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


def test_an_adapter_of_zeros_in_place_of_the_right_one_is_caught(server_of, write_recipe, monkeypatch):
    server = server_of("qwen2_5_vl").wait()
    recipe = load_recipe("grpo", write_recipe("qwen2_5_vl", rollout=by_server(server.url)), [])
    publish = Publisher.publish

    def publish_zeros(self, version, write):
        def write_zeros(directory: Path) -> None:
            write(directory)
            tensors = load_file(directory / WEIGHTS)
            save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, directory / WEIGHTS)

        return publish(self, version, write_zeros)

    monkeypatch.setattr(Publisher, "publish", publish_zeros)
    with open_run(recipe) as run, pytest.raises(EnvironmentProblem, match="the engine leaves the adapter out"):
        grpo.train(recipe, run)


def test_the_gradient_of_sampled_completions_is_that_of_the_same_ones_replayed(server_of, write_recipe):
    server = server_of("qwen2_vl").wait()
    recipe = load_recipe("grpo", write_recipe("qwen2_vl", rollout=by_server(server.url)), [])
    scored, sampled_gradient = one_update(recipe)
    record = json.loads(json.dumps([recorded(group) for group in scored]))  # what rollouts/ keeps of it
    _, replayed_gradient = one_update(recipe, replay=record)
    assert float(sampled_gradient.abs().max()) > 0
    assert torch.equal(sampled_gradient, replayed_gradient)
    repeated = recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"form": "repeated"})})
    _, plain_gradient = one_update(repeated, replay=record)
    torch.testing.assert_close(sampled_gradient, plain_gradient, rtol=1e-4, atol=1e-6)


def one_update(recipe, replay=None) -> tuple[list[ScoredGroup], torch.Tensor]:
    """The flat gradient of one update on completions of the server, or on recorded ones without any server."""
    trainer = build_trainer(recipe)
    family = trainer.policy.family
    rows = read_rows(recipe.data.train, recipe.data, "grpo").rows
    encode = prompt_encoder(family, recipe.data)
    prompts = [encode(row, index) for index, row in enumerate(rows[:4])]
    if replay is None:
        with open_run(recipe) as run, open_sampler(recipe, trainer, run, rows) as sync:
            sync.update_weights(0)
            groups = sync.sampler.sample(prompts, sampling_params(recipe.rollout), [10 * index for index in range(4)])
    else:
        groups = [replayed(prompt, record) for prompt, record in zip(prompts, replay, strict=True)]
    scored = [
        ScoredGroup(
            group=group,
            completions=tuple(
                ScoredCompletion(completion=completion, rewards={}, total=float(number % 3), is_correct=None)
                for number, completion in enumerate(group.completions)
            ),
        )
        for group in groups
    ]
    kept = keep_gradients(trainer)
    learn(trainer, advantage_groups(scored, step_advantages(trainer.ranks, scored, recipe)), recipe)
    return scored, kept[0]


def recorded(group: ScoredGroup) -> list[dict]:
    return [
        {"token_ids": each.completion.token_ids_L.tolist(), "seed": each.completion.seed} for each in group.completions
    ]


def replayed(prompt, record: list[dict]) -> Group:
    completions = [
        Completion(
            token_ids_L=torch.tensor(each["token_ids"]),
            logprobs_L=torch.full((len(each["token_ids"]),), torch.nan),
            text="",
            is_truncated=False,
            seed=each["seed"],
        )
        for each in record
    ]
    return Group(prompt=prompt, completions=tuple(completions), policy_version=0)


def test_base_weights_are_bit_identical_after_forty_published_versions(write_recipe, tmp_path):
    """In a process of its own, for the engine is one for each process."""
    recipe = write_recipe("qwen2_5_vl", rollout={"engine": "vllm", "max_new_tokens": 4})
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm.test_gate", str(recipe)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["versions"] == 40 and found["texts"] > 1  # the policy did change
    assert found["trainer"][0] == found["trainer"][1]
    assert found["engine"][0] == found["engine"][1]


def publish_many(recipe_path: str, versions: int = 40) -> None:
    """Print the hashes of the base weights of trainer and engine before the first version and after the last."""
    recipe = load_recipe("grpo", Path(recipe_path), [])
    trainer = build_trainer(recipe)
    rows = read_rows(recipe.data.train, recipe.data, "grpo").rows
    encode = prompt_encoder(trainer.policy.family, recipe.data)
    prompts = [encode(row, index) for index, row in enumerate(rows[:2])]
    params = greedy_params(recipe.rollout)
    texts = set()
    with open_run(recipe) as run, open_sampler(recipe, trainer, run, rows) as sync:
        in_trainer, in_engine = [hash_of(trainer.policy.model)], [sync.sampler.engine.apply_model(hash_of)[0]]
        for version in range(versions):
            with torch.no_grad():
                for parameter in trainer.policy.trained_parameters().values():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            sync.update_weights(version)
            texts.add(tuple(c.text for g in sync.sampler.sample(prompts, params, [0, 0]) for c in g.completions))
        in_trainer.append(hash_of(trainer.policy.model))
        in_engine.append(sync.sampler.engine.apply_model(hash_of)[0])
    print(json.dumps({"versions": versions, "texts": len(texts), "trainer": in_trainer, "engine": in_engine}))


def hash_of(model: torch.nn.Module) -> str:
    """Of every weight but the adapters'."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if "lora" not in name:
            digest.update(name.encode() + tensor.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    publish_many(sys.argv[1])
