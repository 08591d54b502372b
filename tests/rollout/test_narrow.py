"""Copies of weights in autocast's dtype: autocast's numbers to the bit, current weights at addresses that stay."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.tiny_models import FAMILY_NAMES, move_adapter, tiny_policy, tiny_prompts
from tiercel.config.schema import Rollout
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.decoding_weights import NarrowLinears
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import sampling_params

PARAMS = sampling_params(Rollout(group_size=3, max_new_tokens=8))


def bfloat16_policy(checkpoint, **keys) -> Policy:
    return tiny_policy(checkpoint, noise=0.3, dtype="bfloat16", **keys)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("keys", ({}, {"lora": None}), ids=("adapter", "whole"))
def test_numbers_are_those_of_autocast(tiny_checkpoints, name, keys):
    policy = bfloat16_policy(tiny_checkpoints[name], **keys)
    linears = NarrowLinears(policy)
    decoder = FixedDecoder(policy, VisionStore(policy, 0), None)
    prompts = tiny_prompts(policy.family)
    ids = torch.arange(6) + 3
    found = []
    with torch.no_grad(), linears.of_present_weights():
        for is_in_place in (False, True):
            with policy.autocast(keeps_casts=False):
                decoder.prefill(prompts[:2], 3, 8)
                if is_in_place:
                    with linears.in_place():
                        found.append(decoder.step(ids))
                else:
                    found.append(decoder.step(ids))
    assert torch.equal(*found)


@pytest.mark.parametrize("keys", ({}, {"lora": None}), ids=("adapter", "whole"))
def test_a_step_casts_no_weight(tiny_checkpoints, keys):
    policy = bfloat16_policy(tiny_checkpoints["qwen2_vl"], **keys)  # its head is tied to the embedding
    linears = NarrowLinears(policy)
    decoder = FixedDecoder(policy, VisionStore(policy, 0), None)
    weights = {parameter.data_ptr() for parameter in policy.model.parameters() if parameter.ndim > 1}
    with torch.no_grad(), linears.of_present_weights(), policy.autocast(keeps_casts=False), linears.in_place():
        decoder.prefill(tiny_prompts(policy.family)[:1], 2, 8)
        with torch.profiler.profile(record_shapes=True) as profile:
            decoder.step(torch.tensor([3, 4]))
    shapes = {tuple(parameter.shape) for parameter in policy.model.parameters() if parameter.data_ptr() in weights}
    casts = [event for event in profile.events() if event.name == "aten::_to_copy"]
    assert casts and not [event for event in casts if tuple(event.input_shapes[0]) in shapes]


def test_present_weights_are_copied_to_where_they_were(tiny_checkpoints):
    policy = bfloat16_policy(tiny_checkpoints["qwen2_5_vl"])
    linears = NarrowLinears(policy)
    adapted = [name for name, _ in policy.model.named_parameters() if ".lora_" in name]
    with linears.of_present_weights():
        assert len(linears.copies) == len(adapted) and all(weight is not None for weight, _ in linears.copies.values())
        places = [weight.data_ptr() for weight, _ in linears.copies.values()]
    layers = policy.family.language_model(policy.model).layers
    assert len(set(places)) == len(adapted) - 3 * len(layers)  # q, k and v have one, and so have gate and up
    parameters = {weight for weight, _ in linears.copies.values()}
    assert linears.held_bytes == sum(2 * weight.numel() for weight in parameters)
    move_adapter(policy, 0.1, seed=7)
    with linears.of_present_weights():
        assert [weight.data_ptr() for weight, _ in linears.copies.values()] == places
    linears.release()
    assert linears.held_bytes == 0


def test_adapters_of_one_input_share_their_first_matrix(tiny_checkpoints):
    """With a rank of 2, the shared matrix has six rows, and the second one of k_proj is 0 outside columns 2 and 3."""
    policy = bfloat16_policy(tiny_checkpoints["qwen2_5_vl"], lora={"rank": 2, "alpha": 4})
    attention = policy.family.language_model(policy.model).layers[0].self_attn
    layers = attention.q_proj, attention.k_proj, attention.v_proj
    own = attention.k_proj.lora_B["default"].weight
    linears = NarrowLinears(policy)
    inputs = torch.randn(4, attention.q_proj.in_features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), linears.of_present_weights(), policy.autocast():
        plain = [layer(inputs) for layer in layers]
        with linears.in_place():
            (first,) = {layer.lora_A["default"].weight for layer in layers}
            second = attention.k_proj.lora_B["default"].weight
            joined = [layer(inputs) for layer in layers]
    assert first.shape == (6, attention.q_proj.in_features)
    assert torch.equal(second[:, 2:4], own.bfloat16()) and not second[:, :2].any() and not second[:, 4:].any()
    assert all(torch.equal(*both) for both in zip(plain, joined, strict=True))


def test_the_adapter_of_the_reference_is_not_copied(tiny_checkpoints):
    policy = bfloat16_policy(tiny_checkpoints["qwen2_5_vl"])
    own = len(NarrowLinears(policy).layers)
    policy.peft.add_adapter("reference", policy.peft.peft_config["default"])
    assert len(NarrowLinears(policy).layers) == own > 0


def test_what_is_left_alone(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)  # float32 computes in float32
    assert not NarrowLinears(policy).layers
    head = policy.model.get_output_embeddings()
    head.forward = head.forward  # like a library that moves weights in and out
    whole = replace(policy, compute_dtype=torch.bfloat16)
    assert head not in NarrowLinears(whole).layers
    del head.forward
    assert head in NarrowLinears(whole).layers and all(
        type(layer) is nn.Linear for layer in NarrowLinears(whole).layers
    )


def test_samples_of_a_captured_decoder_follow_the_weights(tiny_checkpoints):
    policy = bfloat16_policy(tiny_checkpoints["qwen2_5_vl"], lora=None)
    samplers = [LocalSampler(policy, VisionStore(policy, 0), weights_stay=False) for _ in range(2)]
    for sampler, linears in zip(samplers, (None, NarrowLinears(policy)), strict=True):
        sampler.decoder = FixedDecoder(policy, VisionStore(policy, 0), None)
        sampler.weights = linears or sampler.weights
    for scale in (1.0, 0.5):
        with torch.no_grad():
            policy.model.get_output_embeddings().weight.mul_(scale)
        plain, found = (sampler.sample(tiny_prompts(policy.family), PARAMS, [1, 2, 3]) for sampler in samplers)
        for group, same in zip(found, plain, strict=True):
            for completion, other in zip(group.completions, same.completions, strict=True):
                assert torch.equal(completion.token_ids_L, other.token_ids_L)
                assert torch.equal(completion.logprobs_L, other.logprobs_L)
