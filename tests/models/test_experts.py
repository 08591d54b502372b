"""Mixtures of experts: what is adapted, what stays frozen, and how the load of experts is counted."""

import pytest
import torch

from tests.tiny_models import EXPERT_FAMILIES, move_adapter, random_ids, tiny_policy, tiny_prompts, tiny_recipe
from tiercel.config.schema import Lora
from tiercel.errors import ModelError
from tiercel.models.layers.experts import IMPLEMENTATION, gate_names, mixtures
from tiercel.models.policy import load_for_inference
from tiercel.models.prompts import completion_positions
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.saving import copy_files, save_adapter
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack

EXPERTS = r".*(self_attn\.[qkvo]_proj|mlp\.experts\.(gate_up_proj|down_proj))"
EXPERTS_LORA = Lora(rank=2, alpha=4, targets=EXPERTS)


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_words_adapt_linear_layers_but_no_gate_and_no_expert(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name])
    trained = policy.trained_parameters()
    assert any("_proj.lora_A" in each for each in trained)
    assert not any("experts" in each or ".gate." in each or "shared_expert_gate" in each for each in trained)
    assert any("shared_expert.up_proj" in each for each in trained) == (name == "qwen3_5_moe")
    assert policy.model.config.get_text_config()._experts_implementation == IMPLEMENTATION


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_an_expression_adapts_experts(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], EXPERTS_LORA)
    trained = policy.trained_parameters().items()
    shapes = [tuple(parameter.shape) for each, parameter in trained if "experts" in each and "lora_A" in each]
    assert len(shapes) == 2 * len(mixtures(policy.model))
    assert set(shapes) == {(4 * 2, 64), (4 * 2, 24)}  # experts x rank, inputs


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_full_fine_tuning_leaves_the_gates(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], None)
    frozen = {each for each, p in policy.model.named_parameters() if not p.requires_grad and "language" in each}
    assert frozen == {f"{gate}.weight" for gate in gate_names(policy.model)}
    assert any("experts.gate_up_proj" in each for each in policy.trained_parameters())


@pytest.mark.parametrize(
    ("lora", "message"),
    (
        (Lora(targets=r".*mlp\.gate"), r"model\.language_model\.layers\.0\.mlp\.gate, which cannot be adapted"),
        (Lora(targets=r".*"), "which cannot be adapted here"),
        (Lora(targets=r".*experts\.down_proj", dropout=0.1), r"lora\.dropout: is 0\.1"),
        (Lora(targets=r".*experts"), "matches no linear layer"),
    ),
)
def test_what_cannot_be_adapted_is_refused(tiny_checkpoints, lora, message):
    with pytest.raises(ModelError, match=message):
        tiny_policy(tiny_checkpoints["qwen3_vl_moe"], lora)


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_an_adapter_of_experts_is_saved_read_and_merged(tiny_checkpoints, tmp_path, name):
    policy = tiny_policy(tiny_checkpoints[name], EXPERTS_LORA, noise=0.3)
    save_adapter(policy, tmp_path / "adapter")
    prompt = tiny_prompts(policy.family)[0].token_ids_P[None]
    read = load_for_inference(tiny_recipe(tiny_checkpoints[name]), torch.device("cpu"), tmp_path / "adapter")
    with torch.no_grad():
        trained = policy.model(input_ids=prompt).logits
        assert torch.equal(read.model(input_ids=prompt).logits, trained)
        merged = read.peft.merge_and_unload(safe_merge=True)
        read.family.save(merged, tmp_path / "merged")
        copy_files(tiny_checkpoints[name], tmp_path / "merged")
        exported = load_for_inference(tiny_recipe(tmp_path / "merged"), torch.device("cpu"), None)
        torch.testing.assert_close(exported.model(input_ids=prompt).logits, trained, rtol=0, atol=1e-4)
        plain = load_for_inference(tiny_recipe(tiny_checkpoints[name]), torch.device("cpu"), None)
        assert not torch.allclose(plain.model(input_ids=prompt).logits, trained, atol=1e-2)


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_an_adapter_of_experts_is_the_start_and_the_reference_of_another_run(tiny_checkpoints, tmp_path, name):
    first = tiny_policy(tiny_checkpoints[name], EXPERTS_LORA, noise=0.3)
    save_adapter(first, tmp_path / "adapter")
    lora = EXPERTS_LORA.model_copy(update={"init": str(tmp_path / "adapter")})
    policy = tiny_policy(tiny_checkpoints[name], lora)
    prompt = tiny_prompts(policy.family)[0].token_ids_P[None]
    with torch.no_grad():
        expected = first.model(input_ids=prompt).logits
        assert torch.equal(policy.model(input_ids=prompt).logits, expected)
        move_adapter(policy, 0.5, seed=3)
        assert not torch.allclose(policy.model(input_ids=prompt).logits, expected, atol=1e-2)
        with policy.as_reference():
            assert torch.equal(policy.model(input_ids=prompt).logits, expected)
    fewer = lora.model_copy(update={"targets": r".*experts\.down_proj"})
    with pytest.raises(ModelError, match=r"lora\.targets: .* names"):
        tiny_policy(tiny_checkpoints[name], fewer)


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
@pytest.mark.parametrize("checkpointing", (False, "full"))
def test_the_load_counts_each_token_of_a_pass_with_a_gradient_once(tiny_checkpoints, name, checkpointing):
    policy = tiny_policy(tiny_checkpoints[name])
    packed = packed_groups(policy)
    learner = PackedPolicy(policy, "split", checkpointing).train()
    features = VisionStore(policy, 0).features(packed.images)
    with torch.no_grad():
        learner(packed, features, 1.0)
    assert learner.expert_load.take() == {}
    for mixture in learner.expert_load.mixtures:  # all tokens choose experts 0 and 1 of 4
        mixture.router.register_forward_hook(
            lambda module, inputs, output: (*output[:2], output[2] * 0 + torch.arange(2))
        )
    learner(packed, features, 1.0).logprobs_N.sum().backward()
    load = learner.expert_load.take()
    assert {key: float(value) for key, value in load.items()} == {
        "experts/load_max": 2.0,
        "experts/load_min": 0.0,
        "experts/unused_fraction": 0.5,
    }
    assert learner.expert_load.take() == {}


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_an_adapter_of_experts_has_the_same_gradient_in_every_form(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], EXPERTS_LORA, noise=0.1)
    packed = packed_groups(policy)
    features = VisionStore(policy, 0).features(packed.images)
    gradients = {}
    for form, checkpointing in (("repeated", False), ("split", False), ("dense", "full"), ("split", "selective")):
        PackedPolicy(policy, form, checkpointing).train()(packed, features, 1.0).logprobs_N.sum().backward()
        gradients[form, checkpointing] = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
        policy.model.zero_grad()
    expected = gradients.pop(("repeated", False))
    assert expected.norm() > 0
    for case, found in gradients.items():
        assert (found - expected).norm() / expected.norm() < 1e-5, case


def packed_groups(policy):
    """Two completions of each prompt of `tiny_prompts`."""
    generator = torch.Generator().manual_seed(4)
    items = []
    for prompt in tiny_prompts(policy.family):
        continuations = tuple(
            Continuation(
                token_ids_L=random_ids(policy.family, length, generator),
                positions_DL=completion_positions(prompt.positions_DP, length),
                is_scored_L=torch.ones(length, dtype=torch.bool),
            )
            for length in (5, 2)
        )
        items.append(PackItem(prompt=prompt, continuations=continuations))
    return pack(items)
