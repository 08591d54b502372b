"""Floating-point operations that a learner's update executes, counted by hand from shapes.

A product and a sum are two operations. Only matrix products count. What an update skips is not counted: the weight
gradients of frozen layers; the activation gradients before the first adapters, which nothing needs; attention between
tokens that do not see each other, even if a kernel computes a part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

FORWARD_PRODUCTS = 2  # matrix products of attention: scores, output
BACKWARD_PRODUCTS = 5  # scores again, then the gradients of probabilities, queries, keys and values


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Operations by where they are executed."""

    linear: float = 0.0  # frozen linear layers of the decoder
    lora: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    vision: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "Flops") -> "Flops":
        names = [field.name for field in fields(self)]
        return Flops(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer of every decoder layer. `is_first`: in the first decoder layer, its input needs no gradient."""

    inputs: int
    outputs: int
    is_first: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """A decoder of Qwen2's architecture with LoRA of one rank on all its linear layers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    vocabulary: int
    lora_rank: int

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Return q, k, v, o, gate, up, down."""
        keys = self.key_heads * self.head_size
        return (
            Linear(inputs=self.hidden, outputs=self.hidden, is_first=True),
            Linear(inputs=self.hidden, outputs=keys, is_first=True),
            Linear(inputs=self.hidden, outputs=keys, is_first=True),
            Linear(inputs=self.hidden, outputs=self.hidden),
            Linear(inputs=self.hidden, outputs=self.intermediate),
            Linear(inputs=self.hidden, outputs=self.intermediate),
            Linear(inputs=self.intermediate, outputs=self.hidden),
        )


def decoder_shape(text_config: Any, lora_rank: int) -> DecoderShape:
    """Return the shape of a Hugging Face text config."""
    return DecoderShape(
        layers=text_config.num_hidden_layers,
        hidden=text_config.hidden_size,
        intermediate=text_config.intermediate_size,
        heads=text_config.num_attention_heads,
        key_heads=text_config.num_key_value_heads,
        vocabulary=text_config.vocab_size,
        lora_rank=lora_rank,
    )


def linear_update(tokens: int, layer: Linear, rank: int, *, needs_input_gradient: bool, forwards: int = 1) -> Flops:
    """Count a frozen linear layer with an adapter: `forwards` passes forward and one backward."""
    base = 2.0 * tokens * layer.inputs * layer.outputs
    lora_a, lora_b = 2.0 * tokens * layer.inputs * rank, 2.0 * tokens * rank * layer.outputs
    gradients = 2 * lora_b + lora_a  # of B's weight and input, and of A's weight
    if needs_input_gradient:
        gradients += lora_a
    return Flops(
        linear=base * (forwards + needs_input_gradient),
        lora=(lora_a + lora_b) * forwards + gradients,
    )


def decoder_update(shape: DecoderShape, tokens: int, pairs: int, *, is_checkpointed: bool = False) -> Flops:
    """Count all decoder layers over `tokens`, forward and backward. `pairs` is the number of pairs of a token and one
    it sees, including itself. Activation checkpointing runs each layer forward twice, except for its very last product,
    whose result nothing needs."""
    forwards = 2 if is_checkpointed else 1
    total = Flops()
    for number in range(shape.layers):
        for layer in shape.linears:
            needs_input_gradient = number > 0 or not layer.is_first
            total += linear_update(
                tokens, layer, shape.lora_rank, needs_input_gradient=needs_input_gradient, forwards=forwards
            )
    if is_checkpointed:
        total += Flops(lora=-2.0 * tokens * shape.lora_rank * shape.hidden * shape.layers)
    products = FORWARD_PRODUCTS * forwards + BACKWARD_PRODUCTS
    return total + Flops(attention=2.0 * products * pairs * shape.hidden * shape.layers)


def head_update(shape: DecoderShape, scored_tokens: int) -> Flops:
    """Count a frozen head: the logits, and one more product with its weight for the gradient of the hidden states. This
    holds for the plain computation and for a head that keeps d logp / d h."""
    return Flops(head=4.0 * scored_tokens * shape.vocabulary * shape.hidden)


def vision_forward(vision_config: Any, grid: Sequence[int]) -> Flops:
    """Count Qwen2.5-VL's vision tower over one image. `grid` has its patches (time, height, width)."""
    _, height, width = grid
    patches = height * width
    hidden, merged = vision_config.hidden_size, vision_config.spatial_merge_size**2
    pixels = vision_config.in_channels * vision_config.temporal_patch_size * vision_config.patch_size**2
    per_patch = 4 * hidden * hidden + 3 * hidden * vision_config.intermediate_size  # qkv and output, MLP
    linear = 2.0 * patches * (pixels * hidden + vision_config.depth * per_patch)
    wide = hidden * merged
    linear += 2.0 * (patches // merged) * wide * (wide + vision_config.out_hidden_size)
    whole = len(vision_config.fullatt_block_indexes)
    side = vision_config.window_size // vision_config.patch_size
    windows = _window_squares(height, side) * _window_squares(width, side)
    pairs = whole * patches**2 + (vision_config.depth - whole) * windows
    return Flops(vision=linear + 2.0 * FORWARD_PRODUCTS * pairs * hidden)


def _window_squares(length: int, side: int) -> int:
    """Return the sum of the squared widths of windows along one edge."""
    return length // side * side**2 + (length % side) ** 2


def causal_pairs(length: int, window: int | None = None) -> int:
    """Count the pairs of one causal row."""
    near = length if window is None else min(length, window)  # tokens that see all before them
    return near * (near + 1) // 2 + (length - near) * near


def group_pairs(prompt_length: int, completion_lengths: Sequence[int], window: int | None = None) -> int:
    """Count the pairs of a group whose prompt is computed once."""
    of_prompt = causal_pairs(prompt_length, window)
    rows = repeated_pairs(prompt_length, completion_lengths, window)
    return rows - (len(completion_lengths) - 1) * of_prompt


def repeated_pairs(prompt_length: int, completion_lengths: Sequence[int], window: int | None = None) -> int:
    """Count the pairs of a group whose prompt is computed with every completion."""
    return sum(causal_pairs(prompt_length + length, window) for length in completion_lengths)
