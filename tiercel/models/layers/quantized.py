"""Decoder layers in 4 or 8 bits, with bitsandbytes: NF4 with quantised scales (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314), or int8 with a scale for each row.

Only the frozen linear layers of the decoder are quantised; the head, the embedding, the vision tower and the projector
keep the recipe's dtype. Every product temporarily dequantises its weight, forward and backward, and computes in the
recipe's dtype, so that a token's numbers do not depend on the tokens next to it: a packed row equals a plain one.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tiercel.config.schema import Quantization
from tiercel.errors import EnvironmentProblem, ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.experts import mixtures

# Bytes per weight: for NF4, 4 bits, a byte for the scale of 64 weights, and 4 bytes for 256 of these; for int8, a byte,
# not counting the row's scale.
STORED_BYTES: dict[Quantization, float] = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}


BLOCK = 64  # weights that share a scale in NF4


def quantizable(family: Family, model: HuggingFaceModel, kind: Quantization) -> set[str]:
    """Return the names of the linear layers that are quantised: those inside the decoder's layers, except adapters. In
    NF4 a row must consist of whole blocks, because bitsandbytes 0.50 computes wrong numbers for other rows on a CPU."""
    layers: Any = family.language_model(model).layers
    inside = {id(module) for module in layers.modules()}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside and ".lora_" not in name
        if kind == "int8" or module.in_features % BLOCK == 0
    }


def require_package(key: str) -> None:
    """Raise EnvironmentProblem, which names the recipe's key, if bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(f"{key}: needs the package bitsandbytes; pip install 'tiercel[quantize]'")


def require_linear_layers(model: nn.Module, kind: Quantization) -> None:
    """Raise ModelError for a model with experts, whose weights cannot be quantised."""
    if mixtures(model):
        raise ModelError(
            f"model.quantize: is {kind}, but bitsandbytes quantises only linear layers, which the experts of "
            "this model are not, so most of its weights would stay as they are; remove this key, or use a model "
            "without experts"
        )


def loading_options(
    family: Family, quantize: Quantization | None, dtype: torch.dtype, device: torch.device, *, is_stored: bool
) -> dict[str, Any]:
    """Return what `from_pretrained` needs to quantise layer by layer while it reads, or to read weights that are stored
    quantised. Raises EnvironmentProblem without bitsandbytes, and ModelError if most weights are not in linear
    layers."""
    if not (quantize or is_stored):
        return {}
    require_package("model.quantize")
    if quantize is None or is_stored:
        return {"device_map": {"": device}}
    from transformers import BitsAndBytesConfig

    with torch.device("meta"):
        shapes = family.model_class.from_config(family.checkpoint.config)
    require_linear_layers(shapes, quantize)
    inside = quantizable(family, shapes, quantize)
    others = [name for name, module in shapes.named_modules() if isinstance(module, nn.Linear) and name not in inside]
    kind = (
        {"load_in_8bit": True}
        if quantize == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantize,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        }
    )
    config = BitsAndBytesConfig(**kind, llm_int8_skip_modules=others)
    return {"quantization_config": config, "device_map": {"": device}}


def stored_quantization(config: dict[str, Any], place: str) -> Quantization | None:
    """Return how the weights of a checkpoint are already quantised, according to its config.json, or None if they are
    not. Raises ModelError if `model.quantize` does not have that kind."""
    stored = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if not stored:
        return None
    method = stored.get("quant_method", "bitsandbytes" if "load_in_4bit" in stored else "(none named)")
    if method == "bitsandbytes" and stored.get("load_in_8bit"):
        return "int8"
    if method == "bitsandbytes" and stored.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    kind = f" {stored['bnb_4bit_quant_type']}" if "bnb_4bit_quant_type" in stored else ""
    raise ModelError(
        f"{place}: its weights are quantised by {method}{kind}, whose gradients tiercel has not been tested with; "
        "use the checkpoint in full precision and set model.quantize: nf4 or int8, or use one quantised by "
        "bitsandbytes"
    )


def settle(model: HuggingFaceModel, dtype: torch.dtype) -> None:
    """Make the quantised layers compute in `dtype`, with the same product with and without a gradient."""
    import bitsandbytes

    four_bit: list[Any] = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)]
    for layer in four_bit:
        if layer.in_features % BLOCK and layer.weight.device.type == "cpu":
            raise ModelError(
                f"a quantised layer has rows of {layer.in_features} weights, which is not a multiple of {BLOCK}, and "
                "bitsandbytes computes wrong numbers for it on a CPU; use the checkpoint in full precision and set "
                "model.quantize"
            )
        layer.compute_dtype, layer.compute_type_is_set = dtype, True
        # On CPUs with bfloat16, the layer would reorder its weights after the first pass without a gradient, and from
        # then on compute in bfloat16 and give the layer below no gradient.
        layer.support_avx512bf16_for_cpu = False
    eight_bit: list[Any] = [each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear8bitLt)]
    for layer in eight_bit:
        if layer.state.CB is None:
            layer.init_8bit_state()
        layer.compute_dtype = dtype
        layer.__class__ = int8_linear()  # the same layer with another product


def rounded(weight: Tensor, kind: Quantization) -> Tensor:
    """Quantise a weight and dequantise it again, in float32."""
    from bitsandbytes import functional

    if kind == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        return _dequantized(codes, scales, torch.float32)
    codes, state = functional.quantize_4bit(weight.float(), compress_statistics=True, quant_type=kind)
    return functional.dequantize_4bit(codes, state)


def rounding_error(family: Family, model: HuggingFaceModel, kind: Quantization) -> float:
    """Compute how far the quantised weights of the decoder are from those of a model in full precision: the norm of all
    differences divided by the norm of the weights."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name in quantizable(family, model, kind):
        weight = model.get_parameter(f"{name}.weight").detach().float()
        off = rounded(weight, kind) - weight
        squares += torch.stack([off.square().sum(), weight.square().sum()]).double().cpu()
    return float((squares[0] / squares[1]).sqrt())


def is_quantized(model: HuggingFaceModel) -> bool:
    """Return whether any layers are quantised."""
    return getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False)


@cache
def int8_linear() -> type[nn.Module]:
    """Return the class of an int8 layer. bitsandbytes' own product also rounds the inputs to 8 bits, except in columns
    that are large in some row of the batch, so a token's result would depend on the tokens next to it."""
    import bitsandbytes

    class Int8Linear(bitsandbytes.nn.Linear8bitLt):
        compute_dtype: torch.dtype

        def forward(self, inputs: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.to(self.compute_dtype)
            return _Product.apply(inputs.to(self.compute_dtype), self.state.CB, self.state.SCB, bias)

    return Int8Linear


class _Product(torch.autograd.Function):
    """The product x W^T + b with rows W_i = scale_i / 127 * codes_i; W is not kept for the backward pass."""

    @staticmethod
    def forward(ctx, inputs: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return linear(inputs, _dequantized(codes, scales, inputs.dtype), bias)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scales = ctx.saved_tensors
        return gradient @ _dequantized(codes, scales, gradient.dtype), None, None, None


def _dequantized(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * (scales / 127).to(dtype)[:, None]
