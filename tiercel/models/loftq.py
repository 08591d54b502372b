"""LoftQ (Li et al. 2023, arXiv:2310.08659) in one step: an adapter that starts at what quantising rounded off.

For a weight W with its quantised form Q, B A is the nearest matrix of the adapter's rank to W - Q, from its singular
value decomposition. Q itself stays that of the checkpoint.
"""

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight

from tiercel.errors import ModelError
from tiercel.models.family import Family, HuggingFaceModel
from tiercel.models.loading import load_weights
from tiercel.models.quantized import is_quantized

MORE_RANKS, ITERATIONS = 16, 4  # of the randomised decomposition


@torch.no_grad()
def start_at_rounding(family: Family, model: HuggingFaceModel, dtype: torch.dtype) -> None:
    """Set the new adapter of a quantised model. Reads the checkpoint's weights to the CPU once more, in `dtype`."""
    exact = load_weights(family, dtype, torch.device("cpu"))
    if is_quantized(exact):
        raise ModelError(
            "lora.start: loftq needs the checkpoint in full precision, and this one is quantised; remove it"
        )
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or not hasattr(layer.get_base_layer(), "compute_dtype"):
            continue  # a layer that is not quantised starts at zero
        quantized = dequantize_module_weight(layer.get_base_layer()).float()
        off = exact.get_parameter(f"{name}.weight").to(quantized) - quantized
        rank = layer.r["default"]
        left, values, right = torch.svd_lowrank(off, rank + MORE_RANKS, niter=ITERATIONS)
        roots = values[:rank].sqrt()
        first, second = (matrices["default"].get_parameter("weight") for matrices in (layer.lora_A, layer.lora_B))
        first.copy_(roots[:, None] * right.T[:rank])
        second.copy_(left[:, :rank] * roots / layer.scaling["default"])
