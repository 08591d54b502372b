"""Decoder layers in 4 and 8 bits: what is quantised, and that every form computes the same as the quantised model."""

import json
import re
import shutil

import pytest
import torch
from torch.nn.functional import linear

from tests.models.test_families import huggingface_inputs, items_of
from tests.tiny_models import EXPERT_FAMILIES, FAMILY_NAMES, move_adapter, tiny_policy, tiny_recipe
from tiercel.config.schema import Model
from tiercel.errors import ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.layers.quantized import BLOCK, quantizable, stored_quantization
from tiercel.models.policy import Policy, build_policy, load_for_inference
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import save_adapter
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams

pytest.importorskip("bitsandbytes")
KINDS = ("nf4", "int8")
FORMS = ("split", "dense", "repeated")
DENSE_FAMILIES = tuple(name for name in FAMILY_NAMES if name not in EXPERT_FAMILIES)
CPU = torch.device("cpu")


def quantized_policy(path, kind: str, noise: float = 0.1, **keys) -> Policy:
    recipe = tiny_recipe(path, lora={"rank": 4, "alpha": 8}, **keys)
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": kind})})
    policy = build_policy(chosen, CPU)
    move_adapter(policy, noise)
    return policy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DENSE_FAMILIES)
def test_all_forms_equal_a_plain_forward_of_the_same_quantised_model(tiny_checkpoints, name, kind):
    policy = quantized_policy(tiny_checkpoints[name], kind)
    family = policy.family
    items = items_of(family, torch.Generator().manual_seed(5))
    packed = pack(items)
    features = VisionStore(policy, 0).features(packed.images)
    with torch.no_grad():  # first without a gradient, because bitsandbytes would reorder the weights here
        found = {form: PackedPolicy(policy, form, False)(packed, features, 0.7).logprobs_N for form in FORMS}
        plain = []
        for item in items:
            for each in item.continuations:
                ids_T = torch.cat([item.prompt.token_ids_P, each.token_ids_L])
                logits_TV = policy.model(**huggingface_inputs(family, item.prompt, ids_T)).logits[0] / 0.7
                logits_TV[:, list(family.placeholder_ids)] = -torch.inf
                rows_LV = logits_TV[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
                plain.append(rows_LV.gather(1, each.token_ids_L[:, None])[:, 0])
    for form, logprobs_N in found.items():
        torch.testing.assert_close(logprobs_N, torch.cat(plain), rtol=0, atol=1e-4, msg=form)
    weights_N = torch.randn(len(packed.targets_N), generator=torch.Generator().manual_seed(7))
    gradients = {}
    for form in FORMS:
        (PackedPolicy(policy, form, False)(packed, features, 0.7).logprobs_N * weights_N).sum().backward()
        gradients[form] = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
        policy.model.zero_grad()
    expected = gradients.pop("repeated")
    for form, gradient in gradients.items():
        assert (gradient - expected).norm() / expected.norm() < 1e-5, form


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_with_its_dequantised_weight(tiny_checkpoints, kind):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"]), dtype="float32"))
    model = load_weights(family, torch.float32, CPU, quantize=kind)
    exact = load_weights(family, torch.float32, CPU)
    assert quantizable(family, exact, kind)
    for name in quantizable(family, exact, kind):
        check_layer(model.get_submodule(name), exact.get_parameter(f"{name}.weight"), kind)


def check_layer(layer, exact_OI, kind):
    from bitsandbytes.functional import dequantize_4bit

    if kind == "nf4":
        weight_OI = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    else:
        weight_OI = layer.state.CB.float() * layer.state.SCB[:, None] / 127
    inputs_TI = torch.randn(7, weight_OI.shape[1], generator=torch.Generator().manual_seed(0), requires_grad=True)
    inputs_TI.data[3] *= 50  # larger than bitsandbytes' own int8 product handles without a second product
    output_TO = layer(inputs_TI)
    torch.testing.assert_close(output_TO, linear(inputs_TI, weight_OI, layer.bias))
    (gradient_TI,) = torch.autograd.grad(output_TO.sum(), inputs_TI)
    torch.testing.assert_close(gradient_TI, weight_OI.sum(0).expand_as(gradient_TI))
    error = (weight_OI - exact_OI).norm() / weight_OI.norm()
    assert 0 < error < {"nf4": 0.12, "int8": 0.01}[kind]


def test_only_the_decoders_linear_layers_are_quantised(tiny_checkpoints):
    from bitsandbytes.nn import Linear4bit

    for name in DENSE_FAMILIES:
        family = load_family(Model(path=str(tiny_checkpoints[name]), dtype="bfloat16"))
        model = load_weights(family, torch.bfloat16, CPU, quantize="nf4")
        found = {name for name, module in model.named_modules() if isinstance(module, Linear4bit)}
        exact = load_weights(family, torch.bfloat16, CPU)
        assert found == quantizable(family, exact, "nf4") < quantizable(family, exact, "int8")
        others = quantizable(family, exact, "int8") - found
        assert all(exact.get_submodule(name).in_features % BLOCK for name in others)  # the tiny models' down_proj
        assert {family.part_of(each + ".") for each in found} == {"language"}
        dtypes = {p.dtype for n, p in model.named_parameters() if n.removesuffix(".weight") not in found}
        assert dtypes <= {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_has_the_learners_logprobs(tiny_checkpoints, kind):
    policy = quantized_policy(tiny_checkpoints["qwen3_5"], kind)
    items = items_of(policy.family, torch.Generator().manual_seed(5))
    params = SamplingParams(
        group_size=3, min_new_tokens=2, max_new_tokens=8, temperature=0.8, top_p=1.0, top_k=0, stop=(), greedy=False
    )
    vision = VisionStore(policy, 0)
    groups = LocalSampler(policy, vision).sample([item.prompt for item in items], params, [100, 200, 300])
    for group in groups:
        for completion in group.completions:
            ids_T = torch.cat([group.prompt.token_ids_P, completion.token_ids_L])
            with torch.no_grad():
                logits_TV = policy.model(**huggingface_inputs(policy.family, group.prompt, ids_T)).logits[0] / 0.8
            logits_TV[:, list(policy.family.placeholder_ids)] = -torch.inf
            logprobs_L = logits_TV[len(group.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
            plain_L = logprobs_L.gather(1, completion.token_ids_L[:, None])[:, 0]
            later = slice(2, None)  # before min_new_tokens, the end of a turn is masked
            torch.testing.assert_close(completion.logprobs_L[later], plain_L[later], rtol=0, atol=1e-4)


def test_parts_trained_whole_are_float32_beside_quantised_ones(tiny_checkpoints):
    policy = quantized_policy(tiny_checkpoints["qwen2_5_vl"], "int8", freeze=("vision",), dtype="bfloat16")
    whole = policy.whole_parameters()
    assert whole and {policy.family.part_of(name) for name in whole} == {"projector"}
    assert {parameter.dtype for parameter in whole.values()} == {torch.float32}
    layer = policy.model.get_submodule("model.language_model.layers.0.mlp.up_proj").base_layer
    assert layer.compute_dtype == torch.bfloat16 and layer.state.CB.dtype == torch.int8


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_read_onto_the_same_quantised_weights(tiny_checkpoints, tmp_path, kind):
    policy = quantized_policy(tiny_checkpoints["qwen2_5_vl"], kind)
    save_adapter(policy, tmp_path)
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"])
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": kind})})
    again = load_for_inference(recipe, CPU, tmp_path)
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(5)))
    features = VisionStore(policy, 0).features(packed.images)
    with torch.no_grad():
        first, second = (
            PackedPolicy(each, "split", False)(packed, features, 1.0).logprobs_N for each in (policy, again)
        )
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_bitsandbytes_quantised_is_taken_as_it_is(tiny_checkpoints, tmp_path, kind):
    source = tiny_checkpoints["qwen2_5_vl"]
    family = load_family(Model(path=str(source), dtype="float32"))
    made = load_weights(family, torch.float32, CPU, quantize=kind)
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    made.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored_quantization(stored, "here") == kind
    policy = tiny_policy(tmp_path)
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(5)))
    features = VisionStore(policy, 0).features(packed.images)
    same = quantized_policy(source, kind, noise=0.0)
    with torch.no_grad():
        first, second = (
            PackedPolicy(each, "split", False)(packed, features, 1.0).logprobs_N for each in (policy, same)
        )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    other = {"nf4": "int8", "int8": "nf4"}[kind]
    with pytest.raises(ModelError, match=f"model.quantize: is {other}, but .* is already quantised, as {kind}"):
        load_weights(policy.family, torch.float32, CPU, quantize=other)
    with pytest.raises(ModelError, match="add the section lora"):
        tiny_policy(tmp_path, lora=None)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes fp4"),
    ],
)
def test_other_quantised_checkpoints_are_refused_by_name(tiny_checkpoints, tmp_path, stored, named):
    shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ModelError, match=f"quantised by {re.escape(named)}, .*set model.quantize: nf4 or int8"):
        load_family(Model(path=str(tmp_path)))


@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_models_of_experts_are_refused(tiny_checkpoints, name):
    with pytest.raises(ModelError, match="which the experts of this model are not"):
        quantized_policy(tiny_checkpoints[name], "nf4")


def test_two_loads_give_the_same_bytes(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"]), dtype="float32"))
    first, second = (load_weights(family, torch.float32, CPU, quantize="nf4").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
