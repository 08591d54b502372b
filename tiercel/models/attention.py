"""The decoder's attention, open to forms of our own through transformers' attention interface.

Only the language model is routed; the vision tower keeps the attention it was loaded with. Without a form the routed
decoder computes transformers' own `sdpa`. Shape suffixes: B rows, H query heads, K key heads, T tokens, E head size.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "tiercel"
_NO_MASK = torch.zeros(1, 1, 1, 1)  # transformers takes a mask of four dimensions as it is and makes none of its own


class AttentionForm(Protocol):
    """Attention of one forward pass: one call for each layer, after the rotary embedding."""

    def __call__(self, layer: int, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, scale: float, /) -> Tensor:
        """The output (B, H, T, E). What a token may see is the form's business; no mask comes with the call."""


def route_attention(language_model: nn.Module) -> None:
    """Let the decoder compute whatever form its forward is given as `attention_form`."""
    config: Any = language_model.config
    config._attn_implementation = NAME


def shared_prefix_obstacle(config: Any) -> str | None:
    """Why a decoder of this config cannot run a prompt once for all its completions; None where it can."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if other := sorted(kinds - {"full_attention"}):
        return f"its layers have {' and '.join(kind.replace('_', ' ') for kind in other)}"
    if getattr(config, "attention_dropout", 0.0):
        return f"its attention has dropout {config.attention_dropout:g}"
    return None


def form_inputs(form: AttentionForm) -> dict[str, Any]:
    """Arguments of the decoder's forward that make it use `form`."""
    return {"attention_form": form, "attention_mask": _NO_MASK, "use_cache": False}


def _routed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_form: AttentionForm | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if attention_form is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    # Under autocast rotary embeddings of float32 states are float32, values are not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output_BATE = attention_form(module.layer_idx, query, key, value, options["scaling"])
    return output_BATE.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _routed_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
