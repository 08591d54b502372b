"""Rotary embeddings whose frequencies transformers chooses by the longest sequence of a forward pass: dynamic NTK
scaling and LongRoPE (https://arxiv.org/abs/2402.13753). Beyond some length, the numbers of a row would depend on the
rows that are computed with it, and those of a token on when its keys were cached."""

from typing import Any

from torch import nn

from tiercel.errors import ModelError


def require_steady_positions(config: Any, path: str, longest: int, keys: str) -> None:
    """Raise ModelError if rows of `longest` tokens would change the frequencies of other rows. `config` is the
    decoder's; `keys` are those of the recipe that limit the length."""
    steady = steady_length(config)
    if steady is not None and longest > steady[0]:
        limit, kind = steady
        raise ModelError(
            f"{keys}: rows of up to {longest} tokens are allowed, but as soon as one row of a pass has more than "
            f"{limit}, {path} computes all of them in another way (its rope_type is {kind}), so logprobs would depend "
            f"on the rows beside; allow at most {limit}"
        )


def steady_length(config: Any) -> tuple[int, str] | None:
    """Return the number of tokens up to which the frequencies of a decoder stay the same, and the kind of its rotary
    embedding, or None if they never change."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    kinds = [(each.get("rope_type") or "default", each) for each in by_layer]
    most: int = getattr(config, "max_position_embeddings", 0)
    limits = [(each.get("original_max_position_embeddings", most), kind) for kind, each in kinds if kind == "longrope"]
    limits += [(most, kind) for kind, _ in kinds if kind == "dynamic"]
    return min(limits, default=None)


def keep_frequencies(decoder: nn.Module) -> None:
    """Keep the frequencies of a dynamic rotary embedding as they are. transformers would look at the positions on the
    device in every pass, and wait for them, only to find that they do not change within `steady_length`."""
    for module in decoder.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.rope_type = "default"  # type: ignore[assignment]
