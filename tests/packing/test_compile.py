"""Compiled decoder layers: traced as on a GPU, but run on a CPU operation by operation (`aot_eager`)."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as pytorchs

from tests.models.test_families import policy_of, prompts_of
from tests.packing.items import continuation
from tests.rollout.test_local import PARAMS
from tests.tiny_models import random_ids
from tiercel.config.schema import SftRecipe
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.flex import GRAPHS, compiled_flex
from tiercel.packing.compiling import LAYER_GRAPHS, CompiledLayers, chosen_backend, require_compilable
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackItem, pack
from tiercel.rollout.local.engine import LocalSampler

BACKEND = "aot_eager"
COMPILED = LAYER_GRAPHS * 2  # with a gradient and without
TOWER_GRAPHS = 3  # of Qwen's towers: the first norm, whose input is a view, the others, and the MLP


@pytest.fixture(autouse=True)
def counted_graphs(monkeypatch):
    """Graphs are counted from 0. FlexAttention takes gradients on a CPU, as in test_flex.py."""
    monkeypatch.setattr(pytorchs, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    counters.clear()
    compiled_flex.cache_clear()
    yield
    torch._dynamo.reset()
    compiled_flex.cache_clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def ragged_items(policy: Policy, seed: int) -> list[PackItem]:
    """Some of a text, a one-image and a two-image prompt, each with up to four completions of 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for prompt in prompts_of(policy.family)[seed % 3 :]:
        lengths = torch.randint(1, 31, (1 + seed % 4,), generator=generator).tolist()
        ids = [random_ids(policy.family, length, generator).tolist() for length in lengths]
        made.append(PackItem(prompt=prompt, continuations=tuple(continuation(prompt, each) for each in ids)))
    return made


def gradient(policy: Policy, learner: PackedPolicy, seed: int) -> Tensor:
    """Of one pass over ragged items: the gradient of all adapters, flat."""
    packed = pack(ragged_items(policy, seed))
    policy.model.zero_grad(set_to_none=True)
    learner.train()(packed, VisionStore(policy, 0).features(packed.images), 1.0).logprobs_N.sum().backward()
    return flat_gradient(policy)


def gradient_after_a_prefix(policy: Policy, learner: PackedPolicy, seed: int) -> Tensor:
    """Compute the same with the prompt of a group run by itself, and each completion after it."""
    item = ragged_items(policy, seed)[0]
    prompt = pack([replace(item, continuations=())])
    policy.model.zero_grad(set_to_none=True)
    prefix = learner.train().run_prefix(prompt, VisionStore(policy, 0).features(prompt.images))
    for each in item.continuations:
        learner(pack([replace(item, continuations=(each,))]), None, 1.0, prefix).logprobs_N.sum().backward()
    prefix.backward()
    return flat_gradient(policy)


def flat_gradient(policy: Policy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.trained_parameters().values() if p.grad is not None])


def logprobs(policy: Policy, learner: PackedPolicy, seed: int) -> Tensor:
    packed = pack(ragged_items(policy, seed))
    with torch.no_grad():
        return learner.eval()(packed, VisionStore(policy, 0).features(packed.images), 1.0).logprobs_N


def require_equal(found: Tensor, right: Tensor) -> None:
    assert right.norm() > 0
    assert float((found - right).norm() / right.norm()) < 1e-5


def make_deeper(policy: Policy) -> None:
    """Repeat the layers of the decoder once."""
    decoder = policy.family.language_model(policy.model)
    for layer in list(decoder.layers):
        copied = deepcopy(layer)
        copied.self_attn.layer_idx += len(decoder.layers)
        decoder.layers.append(copied)
    decoder.config.num_hidden_layers *= 2
    decoder.config.layer_types = 2 * decoder.config.layer_types


@pytest.mark.catalogue
def test_four_graphs_serve_all_layers_and_layouts_with_a_gradient_and_four_without(tiny_checkpoints):
    """Beside those of FlexAttention and of the tower: 10 ragged layouts, prompts that are run before their completions,
    checkpointing, and a decoder of twice as many layers."""
    path = tiny_checkpoints["qwen2_5_vl"]
    plain, policy = policy_of(path, lora_noise=0.1), policy_of(path, lora_noise=0.1)
    oracle, learner = PackedPolicy(plain, "dense", False), PackedPolicy(policy, "flex", False, BACKEND)
    require_equal(gradient(policy, learner, 0), gradient(plain, oracle, 0))
    assert graphs() == LAYER_GRAPHS + GRAPHS // 2 + TOWER_GRAPHS
    for seed in range(10):
        require_equal(gradient(policy, learner, seed), gradient(plain, oracle, seed))
        torch.testing.assert_close(logprobs(policy, learner, seed), logprobs(plain, oracle, seed), rtol=0, atol=1e-5)
    split = PackedPolicy(plain, "split", False)
    for seed in range(3, 6):
        found = gradient_after_a_prefix(policy, learner, seed)
        require_equal(found, gradient_after_a_prefix(plain, split, seed))
    checkpointed = PackedPolicy(policy, "flex", "full", BACKEND)
    require_equal(gradient(policy, checkpointed, 1), gradient(plain, oracle, 1))
    make_deeper(policy), make_deeper(plain)
    deeper, right = PackedPolicy(policy, "flex", "full", BACKEND), PackedPolicy(plain, "dense", False)
    require_equal(gradient(policy, deeper, 2), gradient(plain, right, 2))
    assert graphs() == COMPILED + GRAPHS + TOWER_GRAPHS


@pytest.mark.catalogue
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3_vl", LAYER_GRAPHS + TOWER_GRAPHS),
        ("qwen3_5", LAYER_GRAPHS + TOWER_GRAPHS),
        ("internvl", LAYER_GRAPHS),
    ],
)
def test_gradients_of_other_families_equal_those_without_compiling(tiny_checkpoints, name, expected):
    """Also with checkpointing. The delta nets of Qwen3.5 run as they are."""
    plain, policy = (policy_of(tiny_checkpoints[name], lora_noise=0.1) for _ in range(2))
    oracle = PackedPolicy(plain, "split", False)
    for checkpointing in (False, "full"):
        learner = PackedPolicy(policy, "split", checkpointing, BACKEND)
        require_equal(gradient(policy, learner, 1), gradient(plain, oracle, 1))
    assert graphs() == expected


def test_a_graph_too_many_is_an_error_and_the_sampler_runs_uncompiled(tiny_checkpoints):
    policy = policy_of(tiny_checkpoints["qwen2_5_vl"], lora_noise=0.1)
    learner = PackedPolicy(policy, "split", False)
    layers = learner.language_model.layers
    learner.compiled = CompiledLayers(layers, BACKEND, limit=1)
    params = replace(PARAMS, group_size=2, max_new_tokens=4)
    LocalSampler(policy, VisionStore(policy, 0)).sample(prompts_of(policy.family), params, [1, 2, 3])
    assert graphs() == 0
    first = logprobs(policy, learner, 0)
    assert graphs() == LAYER_GRAPHS
    with pytest.raises(TrainingError, match=r"more than 1 graphs.*write learner\.compile: false"):
        gradient(policy, learner, 0)
    assert torch.equal(logprobs(policy, learner, 0), first)  # what is already compiled continues to be used
    PackedPolicy(policy, "split", False)
    assert not any("forward" in vars(part) for layer in layers for part in layer.children())


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_norms_and_mlp_of_a_tower_have_three_graphs_for_pictures_of_all_sizes(tiny_checkpoints, name):
    """The input of the first norm is a view. If the learner does not compile, the tower is not compiled."""
    policy = policy_of(tiny_checkpoints[name])
    store = VisionStore(policy, 0)
    images = [image for prompt in prompts_of(policy.family) for image in prompt.images]
    right = store.features(images)
    PackedPolicy(policy, "split", False, BACKEND)
    for image in images:
        VisionStore(policy, 0).features([image])
    torch.testing.assert_close(VisionStore(policy, 0).features(images), right)
    assert graphs() == TOWER_GRAPHS
    PackedPolicy(policy, "split", False)
    assert not any("forward" in vars(part) for part in policy.model.model.visual.blocks.modules())


def recipe_of(lora: dict | None = None, **learner) -> SftRecipe:
    tree = {"model": {"path": "."}, "data": {"train": "."}, "train": {"steps": 1}, "output": ".", "lora": lora or {}}
    return SftRecipe.model_validate({**tree, "learner": learner})


@pytest.mark.parametrize(
    ("recipe", "strategy", "form", "device", "backend", "said"),
    [
        (recipe_of(), "single", "flex", "cuda", "inductor", "learner.compile: true"),
        (recipe_of(gradient_checkpointing=True), "ddp", "flex", "cuda", "inductor", "learner.compile: true"),
        (recipe_of(), "fsdp2", "flex", "cuda", None, "learner.compile: false, with train.strategy fsdp2"),
        (recipe_of(), "single", "repeated", "cuda", None, "with learner.form repeated"),
        (recipe_of(gradient_checkpointing="selective"), "single", "flex", "cuda", None, "with learner.gradient_ch"),
        (recipe_of({"dropout": 0.1}), "single", "flex", "cuda", None, "learner.compile: false, with lora.dropout 0.1"),
        (recipe_of(), "single", "split", "cpu", None, ""),
        (recipe_of(compile=True), "single", "split", "cpu", "aot_eager", ""),
        (recipe_of(compile=False), "single", "flex", "cuda", None, ""),
    ],
)
def test_auto_compiles_where_it_can_and_says_so(recipe, strategy, form, device, backend, said):
    found, reason = chosen_backend(recipe, STRATEGY_KINDS[strategy], form, torch.device(device))
    assert found == backend
    assert said in reason and bool(said) == bool(reason)


def test_true_is_refused_where_the_run_chose_to_shard():
    require_compilable(recipe_of(compile=True), STRATEGY_KINDS["ddp"])
    require_compilable(recipe_of(), STRATEGY_KINDS["fsdp2"])
    with pytest.raises(EnvironmentProblem, match=r"train\.strategy fsdp2, .*single or ddp, or learner\.compile: auto"):
        require_compilable(recipe_of(compile=True), STRATEGY_KINDS["fsdp2"])
