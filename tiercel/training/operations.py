"""Floating-point operations that an update needs, for `mfu`.

Counted are the matrix products of the decoder over the packed tokens (two of a frozen weight: forward, and the gradient
of its input; three of a trained one), attention between tokens that see each other (two products forward, four
backward), and the head over the scored tokens. Not counted: the vision tower, passes without a gradient (old and
reference logprobs), the recurrence of delta nets, the later tokens of a picture that a token sees, and whatever
checkpointing or a kernel computes a second time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tiercel.learner.forms import packed_length
from tiercel.learner.layout import PackItem
from tiercel.models.attention import heads_of, sights_of
from tiercel.models.experts import Mixture, mixtures
from tiercel.models.policy import Policy

ATTENTION_PRODUCTS = 6


def update_operations(policy: Policy, form: str, items: Sequence[PackItem]) -> float:
    """Count the operations of one forward and backward pass over prompts with their continuations."""
    config = policy.family.checkpoint.config.get_text_config()
    per_pair = _per_pair(config)
    per_token = sum(
        _per_token(module)
        for name, module in policy.family.language_model(policy.model).named_modules()
        if isinstance(module, nn.Linear)
        and name.rpartition(".")[2] != policy.reference_adapter
        and ".experts." not in name  # adapters there are added to the weights, once for each pass
    )
    per_token += sum(_of_experts(mixture, config) for mixture in mixtures(policy.model))
    per_scored = _per_token(policy.model.get_output_embeddings())
    operations = 0.0
    for item in items:
        operations += per_token * packed_length(item, form) + per_scored * _scored(item)
        operations += sum(each * seen_pairs(item, form, window) for window, each in per_pair.items())
    return operations


def _per_pair(config: Any) -> Mapping[int | None, int]:
    """Count the operations of attention for a pair of tokens in all layers with the same window. `config`: of the
    decoder."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    sights = sights_of(config)
    per_pair: Counter[int | None] = Counter()
    for heads, kind in zip(heads_of(config), kinds, strict=False):
        if kind in sights:  # a delta net has none
            per_pair[sights[kind].window] += 2 * ATTENTION_PRODUCTS * config.num_attention_heads * heads.size
    return per_pair


def _per_token(linear: nn.Linear) -> int:
    """Count by shapes that the module remembers, because a sharded weight is smaller."""
    products = 3 if linear.weight.requires_grad else 2
    return 2 * products * linear.in_features * linear.out_features


def _of_experts(mixture: Mixture, config: Any) -> int:
    """Count the three products of each expert that a token uses, and the router's. `config`: of the decoder."""
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    products = 3 if any(parameter.requires_grad for parameter in mixture.block.experts.parameters()) else 2
    chosen = 3 * products * config.num_experts_per_tok * width
    return 2 * config.hidden_size * (chosen + 2 * mixture.router.num_experts)


def seen_pairs(item: PackItem, form: str, window: int | None = None) -> int:
    """Count the pairs of a token with one that it sees, itself included. `window`: how many it sees at most."""
    prompt, lengths = len(item.prompt.token_ids_P), [len(each.token_ids_L) for each in item.continuations]
    return (repeated_pairs if form == "repeated" else group_pairs)(prompt, lengths, window)


def _scored(item: PackItem) -> int:
    return sum(int(each.is_scored_L.sum()) for each in item.continuations)


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
