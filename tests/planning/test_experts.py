"""Weights that a token uses and weights that are stored, for published configs, worked out by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny_models import tiny_recipe
from tiercel.errors import ModelError
from tiercel.models.layers.experts import experts_of_a_token
from tiercel.planning.sizes import bare_family, count, read_config

CONFIGS = Path(__file__).parent / "configs"


def sizes_of(name: str):
    recipe = tiny_recipe(CONFIGS / name, dtype="bfloat16", lora={"rank": 16})
    path, config = read_config(recipe.model)
    return count(recipe, config, bare_family(path, config))


def test_qwen3_vl_30b_a3b():
    sizes = sizes_of("qwen3_vl_30b_a3b")
    experts = 128 * 3 * 2048 * 768  # gate, up and down of each
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128  # q and o, k and v, their norms
    layer = attention + experts + 128 * 2048 + 2 * 2048  # with the router and two norms
    root = 2 * 151936 * 2048 + 2048
    assert sizes.largest_layer == layer
    assert sizes.language_weights == 48 * layer + root == 30_532_122_624
    assert sizes.active_weights == 48 * (layer - experts * 120 // 128) + root == 3_353_032_704
    assert sizes.weights_used_by(2) == 48 * layer + root - round(48 * experts * (15 / 16) ** 2)
    assert sizes.weights == pytest.approx(31.07e9, rel=1e-3)
    assert (sizes.cached_layers, sizes.state_elements) == (48, 0)
    assert sizes.adapter == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))  # attention; experts are not adapted


def test_qwen3_5_27b():
    sizes = sizes_of("qwen3_5_27b")
    assert sizes.active_weights == sizes.language_weights == pytest.approx(26.9e9, rel=0.01)
    assert sizes.weights == pytest.approx(27.4e9, rel=0.01)
    assert sizes.cached_layers == 16
    assert sizes.state_elements == 48 * (48 * 128 * 128 + (2 * 2048 + 6144) * 4)


def test_experts_cannot_be_quantised():
    recipe = tiny_recipe(CONFIGS / "qwen3_vl_30b_a3b", dtype="bfloat16", lora={"rank": 16})
    path, config = read_config(recipe.model)
    with pytest.raises(ModelError, match="experts"):
        count(recipe.with_values({"model.quantize": "nf4"}), config, bare_family(path, config))


def test_the_number_of_experts_of_a_token_by_either_name():
    assert experts_of_a_token(SimpleNamespace(num_experts_per_tok=8)) == 8
    assert experts_of_a_token(SimpleNamespace(top_k_experts=4)) == 4  # Gemma 4
