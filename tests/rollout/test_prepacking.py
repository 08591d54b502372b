"""Prepacked layers against the plain ones: the same numbers, with the current weights, within their bytes."""

import runpy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from tests.tiny_models import FAMILY_NAMES, tiny_policy, tiny_prompts
from tiercel.config.schema import Rollout
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local import decoding_weights
from tiercel.rollout.local.decoding_weights import PrepackedLinears, _is_supported
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import sampling_params

PLENTY = 10**9
PARAMS = sampling_params(Rollout(group_size=4, min_new_tokens=0, max_new_tokens=12))


@pytest.fixture
def policy(tiny_checkpoints) -> Policy:
    return needs_onednn(tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1))


def needs_onednn(policy: Policy) -> Policy:
    if not _is_supported(policy):
        pytest.skip("prepacking is for x86 with oneDNN")
    return policy


def layers_of(policy: Policy) -> list[nn.Module]:
    """Layers that are prepacked: the head, and of the decoder those with an adapter and those without."""
    decoder = policy.family.language_model(policy.model)
    adapted = [module for module in decoder.modules() if type(module) is LoraLinear]
    inside = {child for module in adapted for child in module.modules()}
    bare = [module for module in decoder.modules() if type(module) is nn.Linear and module not in inside]
    return [policy.model.get_output_embeddings(), *adapted, *bare]


def outputs(layer: nn.Module, inputs_R1I: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(inputs_R1I)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("byte_limit", [PLENTY, 200_000, 0])
def test_layers_compute_what_they_did(tiny_checkpoints, name, byte_limit):
    policy = needs_onednn(tiny_policy(tiny_checkpoints[name], noise=0.3))
    policy.model.eval()
    linears = PrepackedLinears(policy, byte_limit)
    layers = layers_of(policy)
    assert (set(linears.copied) == set(layers)) == (byte_limit == PLENTY)
    generator = torch.Generator().manual_seed(byte_limit)
    with linears.of_present_weights():
        for layer in layers:
            width = (layer.base_layer if isinstance(layer, LoraLinear) else layer).in_features
            inputs = torch.randn(7, 1, width, generator=generator)
            expected = outputs(layer, inputs)
            with linears.in_place():
                found = outputs(layer, inputs)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_same_completions_are_sampled(tiny_checkpoints, name):
    policy = needs_onednn(tiny_policy(tiny_checkpoints[name], noise=0.1))
    prompts = tiny_prompts(policy.family)
    expected, *found = (
        LocalSampler(policy, VisionStore(policy, 0), **how).sample(prompts, PARAMS, [100, 200, 300])
        for how in ({"weights_stay": False}, {}, {"prepacked_bytes": 200_000}, {"prepacked_bytes": 0})
    )
    for groups in found:
        for group, same_group in zip(groups, expected, strict=True):
            for completion, same in zip(group.completions, same_group.completions, strict=True):
                assert completion.token_ids_L.tolist() == same.token_ids_L.tolist()
                torch.testing.assert_close(completion.logprobs_L, same.logprobs_L, rtol=1e-6, atol=1e-5)


def test_a_row_is_the_same_among_any_number_of_rows(policy):
    linears = PrepackedLinears(policy, PLENTY)
    head = policy.model.get_output_embeddings()
    hidden_RH = torch.randn(40, head.in_features, generator=torch.Generator().manual_seed(0))
    with linears.of_present_weights(), linears.in_place():
        whole_RV = outputs(head, hidden_RH)
        for rows in range(1, 40):
            assert torch.equal(outputs(head, hidden_RH[:rows]), whole_RV[:rows])


def test_trained_weights_are_copied_anew_and_frozen_ones_once(policy):
    linears = PrepackedLinears(policy, PLENTY)
    head = policy.model.get_output_embeddings()
    layer = next(layer for layer in linears.copied if isinstance(layer, LoraLinear))
    inputs = torch.randn(3, 1, layer.base_layer.in_features, generator=torch.Generator().manual_seed(1))
    with linears.of_present_weights():
        of_head = linears.copies[head]
        assert set(linears.copies) == set(linears.copied)
    assert set(linears.copies) == {kept for kept in linears.copied if not isinstance(kept, LoraLinear)}
    before = outputs(layer, inputs)
    layer.lora_B["default"].weight.data += 0.5  # the parameter's version counter does not notice
    with linears.of_present_weights(), linears.in_place():
        found = outputs(layer, inputs)
        assert linears.copies[head] is of_head
    torch.testing.assert_close(found, outputs(layer, inputs), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, before, atol=0.1)
    with torch.no_grad():
        head.weight += 1.0
    with linears.of_present_weights(), linears.in_place():
        assert linears.copies[head] is not of_head
        hidden_RH = torch.randn(2, head.in_features, generator=torch.Generator().manual_seed(2))
        found = outputs(head, hidden_RH)
    torch.testing.assert_close(found, outputs(head, hidden_RH), rtol=1e-4, atol=1e-4)


def test_bytes_go_to_the_head_first(policy):
    head = policy.model.get_output_embeddings()
    linears = PrepackedLinears(policy, head.weight.nbytes)
    assert linears.copied == [head]
    assert len(linears.uncopied) > 3 and all(type(layer) is nn.Linear for layer in linears.uncopied)
    with linears.of_present_weights():
        assert list(linears.copies) == [head]
    assert PrepackedLinears(policy, 0).copied == []


def test_layers_are_their_own_again_after_an_error(policy):
    linears = PrepackedLinears(policy, 200_000)
    touched = [*linears.copied, *linears.uncopied]
    with pytest.raises(KeyError), linears.of_present_weights(), linears.in_place():
        assert all("forward" in layer.__dict__ for layer in touched)
        raise KeyError
    assert not any("forward" in layer.__dict__ for layer in touched)
    assert all(not isinstance(layer, LoraLinear) for layer in linears.copies)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # a warning from switching oneDNN off
def test_what_is_left_alone(policy):
    assert not PrepackedLinears(policy, None).copied
    assert not PrepackedLinears(replace(policy, compute_dtype=torch.bfloat16), PLENTY).copied
    with torch.backends.mkldnn.flags(enabled=False):
        assert not PrepackedLinears(policy, PLENTY).copied
    head = policy.model.get_output_embeddings()
    head.forward = head.forward  # like a library that moves weights in and out
    assert head not in PrepackedLinears(policy, PLENTY).copied
    del head.forward


def test_an_adapter_that_is_more_than_a_product_keeps_its_forward_pass():
    """DoRA scales what it adds by a norm, so only its base layer is prepacked."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16)])
            self.head = nn.Linear(16, 32, bias=False)

        def get_output_embeddings(self):
            return self.head

    class Family:
        def language_model(self, model):
            return model.layers

    torch.manual_seed(0)
    model = Decoder()
    get_peft_model(model, LoraConfig(r=2, use_dora=True, target_modules=["layers.0"], init_lora_weights=False))
    policy = needs_onednn(
        Policy(
            family=Family(),
            model=model,
            peft=None,
            reference_adapter=None,
            compute_dtype=torch.float32,
            device=torch.device("cpu"),
        )
    )
    layer = model.layers[0]
    linears = PrepackedLinears(policy, PLENTY)
    assert layer not in linears.copied and layer.base_layer in linears.copied
    inputs = torch.randn(3, 16)
    expected = outputs(layer, inputs)
    with linears.of_present_weights(), linears.in_place():
        torch.testing.assert_close(outputs(layer, inputs), expected, rtol=1e-5, atol=1e-5)


def test_a_build_of_pytorch_without_onednn_has_no_operators_to_look_up(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    runpy.run_path(decoding_weights.__file__)
