"""Decoder layers that are compiled with the attention of a step, so that a token launches fewer kernels.

All layers of one kind and all numbers of rows use the same graph. Norms, the rotary embedding, the sums of the adapters
and the writing of keys and values become a few fused kernels between the products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tag, Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.experimental import _config
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiercel.models.layers.attention import IMPLEMENTATION, GivenForm, attention_spans_of
from tiercel.models.layers.experts import is_mixture
from tiercel.packing.compiling import without_regions
from tiercel.rollout.local.decoding_weights import replaced
from tiercel.rollout.local.static_cache import FixedMemory, LayerAttention

COMPILED = "tiercel_step"  # the name of this attention in transformers
GRAPH_LIMIT = 32  # for a kind of layer in one process
_shapes: Any = _config


class CompiledStep:
    """The layers of a decoder that are compiled for steps. Layers with experts or with a state stay as they are."""

    def __init__(self, language_model: Any, backend: Any):
        self.config = language_model.config
        spans = attention_spans_of(self.config)
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * len(language_model.layers)
        self.windows = {
            number: (layer, spans[kind].window)
            for number, (layer, kind) in enumerate(zip(language_model.layers, kinds, strict=True))
            if kind in spans and not any(is_mixture(part) for part in layer.modules())
        }
        self.functions = {
            kind: torch.compile(
                kind.forward,
                dynamic=True,
                fullgraph=True,
                backend=backend,
                options={"joint_custom_pre_pass": COMPUTE_ONCE} if backend == "inductor" else None,
            )
            for kind in {type(layer) for layer, _ in self.windows.values()}
        }

    @contextmanager
    def running(self, memory: FixedMemory, rows: int) -> Iterator[None]:
        """Run steps of this number of rows compiled inside the context."""
        forwards: dict[nn.Module, Callable[..., Any]] = {
            layer: partial(self._run, layer, memory.of_layer(number, rows, self.config.num_attention_heads, window))
            for number, (layer, window) in self.windows.items()
        }
        self.config._attn_implementation = COMPILED
        try:
            with (
                replaced(forwards),
                without_regions(forwards),
                torch._dynamo.config.patch(recompile_limit=GRAPH_LIMIT),
                _shapes.patch(use_duck_shape=False),  # sizes that are equal by chance would be taken for one
            ):
                yield
        finally:
            self.config._attn_implementation = IMPLEMENTATION

    def _run(
        self, layer: nn.Module, attention: LayerAttention, *inputs: Any, attention_form: GivenForm, **options: Any
    ) -> Any:
        return self.functions[type(layer)](layer, *inputs, attention_form=attention, **options)


class ComputeOnce(CustomGraphPass):
    """Removes repeated operations from a graph without gradient, such as the product with the first matrix that several
    adapters share. Inductor itself does so only in graphs with gradient."""

    def __call__(self, graph: Graph) -> None:
        known: dict[object, Node] = {}
        for node in graph.nodes:
            if node.op != "call_function" or node.is_impure() or not isinstance(node.target, OpOverload):
                continue
            if node.target._schema.is_mutable or Tag.nondeterministic_seeded in node.target.tags:
                continue
            key = node.target, str(node.args), str(node.kwargs)
            if known.setdefault(key, node) is not node:
                node.replace_all_uses_with(known[key])
                graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


COMPUTE_ONCE = ComputeOnce()  # one for all: Dynamo would compile again for another


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_form: LayerAttention | GivenForm,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if isinstance(attention_form, GivenForm):  # a layer that is not compiled
        given = {"attention_form": attention_form, **options}
        return ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION](module, query, key, value, attention_mask, **given)
    output_RA1E = attention_form(options["scaling"], query.to(value.dtype), key.to(value.dtype), value)
    return output_RA1E.transpose(1, 2).contiguous(), None


AttentionInterface.register(COMPILED, _attention)
AttentionMaskInterface.register(COMPILED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
