"""The decoder's attention with tiercel's own forms, through transformers' attention interface.

Only the language model is changed; the vision tower keeps the attention that it was loaded with. Without a form, the
decoder computes transformers' own `sdpa`. Shape suffixes: docs/shapes.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiercel.errors import ModelError
from tiercel.models.layers.attention_span import FULL, AttentionSpan
from tiercel.models.layers.delta_net import BRANCHING_MODELS, DeltaScan, DeltaTokens, route_delta_nets

IMPLEMENTATION = "tiercel"  # the name of this attention in transformers
LARGEST_GROUPED_HEAD = 256  # the limit of FlashAttention
_CAUSAL_OUTSIDE = ("gemma4_text",)  # decoders whose layers without a window see pictures causally
_NOT_COMPUTED = {"softcap": "caps its scores", "s_aux": "has sinks"}  # by the option that a decoder passes
_NO_MASK = torch.zeros(1, 1, 1, 1)  # transformers uses a mask of four dimensions as it is instead of making its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The attention of one layer."""

    index: int  # among the layers of the decoder
    scale: float  # of the scores
    attention_span: AttentionSpan = FULL


class Attend(Protocol):
    """The attention of one forward pass. It is called once for each layer, after the rotary embedding."""

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, /) -> Tensor:
        """Return the output (B, A, T, E). The form itself decides which tokens a token attends to, so it gets no
        mask."""


def attended(
    query_BASE: Tensor,
    key_BJTE: Tensor,
    value_BJTE: Tensor,
    layer: Layer,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Compute PyTorch's attention (B, A, S, E) with grouped heads.

    On a GPU, the kernels that do not hold all scores support grouped heads only without a mask and up to a size of 256.
    Otherwise keys and values are repeated, because PyTorch would hold all scores: 20.8 GiB for 8 prompts of 4,096
    tokens in 16 heads.
    """
    is_grouped = query_BASE.shape[1] != key_BJTE.shape[1]
    if is_grouped and query_BASE.is_cuda and (mask is not None or query_BASE.shape[3] > LARGEST_GROUPED_HEAD):
        group = query_BASE.shape[1] // key_BJTE.shape[1]
        key_BJTE, value_BJTE = (each.repeat_interleave(group, dim=1) for each in (key_BJTE, value_BJTE))
        is_grouped = False
    return scaled_dot_product_attention(
        query_BASE, key_BJTE, value_BJTE, mask, is_causal=is_causal, scale=layer.scale, enable_gqa=is_grouped
    )


class PackAttend(Attend, Protocol):
    """The attention of a pack."""

    def prepare(self, attention_span: AttentionSpan) -> object:
        """Build what layers with this attention span need; otherwise their first call builds it."""


class AttentionForm(Attend, Protocol):
    """The exchange between the tokens of one forward pass: by attention, or by a state."""

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        """Return the output (B, T, A, E) of a layer with a state. The form decides which state a token continues
        from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenForm:
    """The container that carries a forward pass's form to the layers. It is one type for all forms, because compiled
    layers would be recompiled for another type."""

    form: AttentionForm


def route_attention(language_model: nn.Module) -> None:
    """Make the decoder compute the form that is passed to its forward pass as `attention_form`."""
    config: Any = language_model.config
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ModelError(f"all tokens of this {config.model_type} attend to each other, so it cannot generate text")
    config._attn_implementation = IMPLEMENTATION
    route_delta_nets(language_model)


def shared_prefix_obstacle(config: Any) -> str | None:
    """Return why a decoder with this config cannot run a prompt once for all its completions, or None if it can."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    shared = {"full_attention", "sliding_attention"}
    if config.model_type in BRANCHING_MODELS:
        shared.add("linear_attention")
    if other := sorted(kinds - shared):
        return f"its layers have {' and '.join(kind.replace('_', ' ') for kind in other)}"
    return None


def form_inputs(form: AttentionForm) -> dict[str, Any]:
    """Return the arguments of the decoder's forward pass that make it use `form`."""
    return {"attention_form": GivenForm(form=form), "attention_mask": _NO_MASK, "use_cache": False}


class Heads(NamedTuple):
    """The shape of a layer's attention."""

    keys: int  # heads of keys and values
    size: int  # of a head


def heads_of(config: Any) -> list[Heads]:
    """Return the heads of each layer of a decoder with this config. In Gemma 4 they differ between layers."""
    layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
    usual = config.hidden_size // config.num_attention_heads
    return [Heads(keys=each.num_key_value_heads, size=getattr(each, "head_dim", None) or usual) for each in layers]


def attention_spans_of(config: Any) -> dict[str, AttentionSpan]:
    """Return the attention span of each kind of layer of a decoder with this config, by transformers' names."""
    window = getattr(config, "sliding_window", None)
    if not (kinds := getattr(config, "layer_types", None)):
        return {"full_attention": _attention_span(config, window)}  # if there is a window, all layers have it
    spans = {"full_attention": _attention_span(config, None), "sliding_attention": _attention_span(config, window)}
    return {kind: spans[kind] for kind in sorted(set(kinds)) if kind in spans}


def _attention_span(config: Any, window: int | None) -> AttentionSpan:
    return AttentionSpan(window=window, whole_pictures=window is not None or config.model_type not in _CAUSAL_OUTSIDE)


def position_ids(positions: Tensor) -> Tensor:
    """Convert positions (D, rows, length) to transformers' form: (rows, length) if D is 1."""
    return positions if positions.shape[0] == 3 else positions[0]


@torch.compiler.disable  # not compiled: a form may do anything, and `layer_idx` is specific to a layer
def _routed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_form: GivenForm | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    for option, what in _NOT_COMPUTED.items():
        if options.get(option) is not None:
            raise ModelError(f"the attention of {module.config.model_type} {what}, which tiercel does not compute")
    if attention_form is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    # Under autocast, queries and keys of float32 states are float32 after the rotary embedding; values are not.
    query, key = query.to(value.dtype), key.to(value.dtype)
    attention_span = _attention_span(module.config, options.get("sliding_window"))
    layer = Layer(index=module.layer_idx, scale=options["scaling"], attention_span=attention_span)
    output_BATE = attention_form.form(layer, query, key, value)
    return output_BATE.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, _routed_attention)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
