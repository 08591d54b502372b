"""The bytes of quantised weights in the plan, against those of the real model."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from tests.planning.test_memory import recipe_of
from tests.tiny_models import save_tiny_checkpoint
from tiercel.config.schema import Model
from tiercel.models.families.loading import load_family
from tiercel.models.layers.quantized import quantizable
from tiercel.models.policy import build_policy
from tiercel.models.weights.loading import load_weights
from tiercel.packing.forward import PackedPolicy
from tiercel.planning.memory import Layout, rank_memory
from tiercel.planning.options import measure, study
from tiercel.planning.probe import GPU_TILE, LiveBytes, packed_case

pytest.importorskip("bitsandbytes")


def real_bytes(model, layers: set[str]) -> int:
    """Return the bytes of the language model: its parameters, and the scales of those that are quantised."""
    found = 0
    for name in layers:
        layer = model.get_submodule(name)
        state = getattr(layer.weight, "quant_state", None)
        if state is None:
            found += layer.state.CB.nbytes + layer.state.SCB.nbytes
        else:
            found += layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    return found


@pytest.mark.parametrize("kind", ("nf4", "int8"))
@pytest.mark.parametrize("name", ("qwen2_5_vl", "qwen3_5"))
def test_planned_weights_are_those_of_the_real_model(tmp_path, name, kind):
    checkpoint = save_tiny_checkpoint(name, tmp_path / name)
    family = load_family(Model(path=str(checkpoint), dtype="float32"))
    layers = quantizable(family, load_weights(family, torch.float32, torch.device("cpu")), kind)
    model = load_weights(family, torch.float32, torch.device("cpu"), quantize=kind)
    recipe = recipe_of(checkpoint, {})
    plain = study(recipe, None).sizes
    sizes = study(recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": kind})}), None).sizes
    assert plain.quantized == 0 and plain.language_bytes(2) == 2 * plain.language_weights
    rest = 4 * (sizes.language_weights - sizes.quantized)
    assert sizes.language_bytes(4) - rest == pytest.approx(real_bytes(model, layers), rel=0.1)
    assert sizes.language_weights == plain.language_weights


@pytest.mark.quantized
@pytest.mark.parametrize("kind", ("nf4", "int8"))
def test_the_peak_of_a_pass_is_within_a_tenth(tmp_path, kind):
    """Of a model that is large enough for its weights to matter, with real tensors."""
    checkpoint = save_tiny_checkpoint("qwen2_5_vl", tmp_path / "small")
    changes = {"model": {"quantize": kind, "dtype": "float32"}, "learner": {"max_tokens_per_microbatch": 2048}}
    widened(checkpoint, layers=3, hidden=512, intermediate=2048)
    recipe = recipe_of(checkpoint, changes)
    subject = study(recipe, None)
    layout = Layout(strategy="single", ranks=1, tokens=2048, on_gpu=False)
    planned = rank_memory(recipe, subject.sizes, measure(subject), None, layout)
    policy = build_policy(recipe, torch.device("cpu"))
    learner = PackedPolicy(policy, "split", False).train()
    learner.head.tile = GPU_TILE
    packed = packed_case(subject.composition, 2048, subject.family.position_dimensions)
    with LiveBytes() as live:
        for _ in range(2):  # the second microbatch finds gradients there
            learner(packed, None, 1.0).logprobs_N.sum().backward()
            gc.collect()
    layers = quantizable(subject.family, policy.model, kind)
    others = sum(p.nbytes for name, p in policy.model.named_parameters() if name.removesuffix(".weight") not in layers)
    real = others + real_bytes(policy.model, layers) + live.peak
    expected = planned.phases["learn"] - planned.components["optimizer moments"]
    print(f"{kind}: planned {expected / 1e6:.1f} MB, real {real / 1e6:.1f} MB")
    assert expected == pytest.approx(real, rel=0.1)


def widened(checkpoint: Path, *, layers: int, hidden: int, intermediate: int) -> None:
    """Write the checkpoint again with a larger decoder."""
    config = AutoConfig.from_pretrained(checkpoint)
    text = config.text_config
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = layers, hidden, intermediate
    text.layer_types = ["full_attention"] * layers
    text.head_dim = None
    config.vision_config.out_hidden_size = hidden
    size = hidden // text.num_attention_heads // 2
    text.rope_parameters = {
        **text.rope_parameters,
        "mrope_section": [size // 2, size // 4, size - size // 2 - size // 4],
    }
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(checkpoint)
