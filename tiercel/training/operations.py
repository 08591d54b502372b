"""Floating-point operations that an update needs, for `mfu`.

Counted are the matrix products of the decoder over the packed tokens (two of a frozen weight: forward, and the gradient
of its input; three of a trained one), attention between tokens that see each other (two products forward, four
backward), and the head over the scored tokens. Not counted: the vision tower, passes without a gradient (old and
reference logprobs), and whatever checkpointing or a kernel computes a second time. A layer with a window counts as one
without.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tiercel.learner.forms import packed_length
from tiercel.learner.layout import PackItem
from tiercel.models.attention import heads_of
from tiercel.models.experts import Mixture, mixtures
from tiercel.models.policy import Policy

ATTENTION_PRODUCTS = 6


def update_operations(policy: Policy, form: str, items: Sequence[PackItem]) -> float:
    """Count the operations of one forward and backward pass over prompts with their continuations."""
    config = policy.family.checkpoint.config.get_text_config()
    per_pair = 2 * ATTENTION_PRODUCTS * config.num_attention_heads * sum(heads.size for heads in heads_of(config))
    per_token = sum(
        _per_token(module)
        for name, module in policy.family.language_model(policy.model).named_modules()
        if isinstance(module, nn.Linear)
        and name.rpartition(".")[2] != policy.reference_adapter
        and ".experts." not in name  # adapters there are added to the weights, once for each pass
    )
    per_token += sum(_of_experts(mixture, config) for mixture in mixtures(policy.model))
    per_scored = _per_token(policy.model.get_output_embeddings())
    return sum(
        per_token * packed_length(item, form) + per_pair * seen_pairs(item, form) + per_scored * _scored(item)
        for item in items
    )


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


def seen_pairs(item: PackItem, form: str) -> int:
    """Count the pairs of a token with one that it sees, itself included."""
    prompt, lengths = len(item.prompt.token_ids_P), [len(each.token_ids_L) for each in item.continuations]
    return repeated_pairs(prompt, lengths) if form == "repeated" else group_pairs(prompt, lengths)


def _scored(item: PackItem) -> int:
    return sum(int(each.is_scored_L.sum()) for each in item.continuations)


def causal_pairs(length: int) -> int:
    """Count the pairs of one causal row."""
    return length * (length + 1) // 2


def group_pairs(prompt_length: int, completion_lengths: Sequence[int]) -> int:
    """Count the pairs of a group whose prompt is computed once."""
    own = sum(causal_pairs(length) for length in completion_lengths)
    return causal_pairs(prompt_length) + sum(completion_lengths) * prompt_length + own


def repeated_pairs(prompt_length: int, completion_lengths: Sequence[int]) -> int:
    """Count the pairs of a group whose prompt is computed with every completion."""
    return sum(causal_pairs(prompt_length + length) for length in completion_lengths)
