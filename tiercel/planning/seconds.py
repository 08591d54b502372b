"""Seconds of a step from assumed figures of a device: an estimate to compare layouts, not a promise."""

from collections.abc import Mapping

from tiercel.config.schema import BaseRecipe, Checkpointing
from tiercel.models.policy import weights_dtype
from tiercel.planning.devices import Device
from tiercel.planning.memory import BYTES, Layout, RolloutLoad, cache_token_bytes, cached_rows, engine_weights
from tiercel.planning.sizes import ModelSizes

# Additional forward passes. For selective, this is the share of a 7B layer's operations that are computed again.
CHECKPOINTED_PASSES: Mapping[Checkpointing, float] = {False: 0, "selective": 0.43, "full": 1}
REDUCE_SECONDS = 15e-6  # the shortest sum over tensor-parallel ranks; assumed, not measured


def link_speed(device: Device, ranks: int) -> float:
    """Return the bytes per second of a ring over the ranks, which its slowest link limits."""
    speed = device.link if ranks <= device.per_machine else device.network
    return device.reached_link * speed


def phase_seconds(
    recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad | None, device: Device, layout: Layout, packed: int
) -> Mapping[str, float]:
    """Estimate the seconds of one step by phase, on the rank with the most prompts: rollout, learning, and
    communication that does not overlap with learning. `packed` is the number of tokens that the rank learns from,
    together with others if ranks compute them together."""
    flops = device.reached_flops * device.flops
    together = recipe.train.context_parallel
    passes = 2.0 if recipe.lora is not None else 3.0  # a frozen weight's gradient is not computed
    passes += CHECKPOINTED_PASSES[recipe.learner.gradient_checkpointing]
    learn = 2 * packed / together * (passes * sizes.active_weights + 3 * sizes.adapter) / flops
    seconds = {} if rollout is None else {"rollout": rollout_seconds(recipe, sizes, rollout, device)}
    if rollout is not None and rollout.teacher.elements:
        seconds["teaching"] = 2 * packed / together * rollout.teacher.elements / flops
    microbatches = max(1, -(-packed // layout.tokens))
    dequantising = sizes.dequantising_bytes(BYTES[recipe.model.dtype]) / (device.reached_bandwidth * device.bandwidth)
    seconds["learn"] = learn + microbatches * passes * dequantising
    weights = weights_dtype(recipe).itemsize * sizes.language_weights
    speed, share = link_speed(device, layout.ranks), (layout.ranks - 1) / layout.ranks
    to_host = device.reached_link * device.host_link
    zero = layout.zero(recipe)
    gathering = 0.0  # for all weights, once
    if layout.kind.shards_model and zero.stage == 3:
        shares = layout.shares(recipe)
        gathering = weights * (shares - 1) / shares / link_speed(device, shares)
    if zero.offload_parameters:
        gathering += weights / layout.ranks / to_host
    if gathering:
        # Forward and backward; recomputation finds the weights still gathered.
        seconds["waiting for weights"] = max(0.0, 2 * microbatches * gathering - learn)
        if rollout is not None and rollout.engine.shares_weights:
            seconds["rollout"] += gathering
    if together > 1:  # keys and values in each forward pass; in the backward pass, their gradients in float32
        width = cache_token_bytes(recipe, sizes, 1) * (passes - 1 + BYTES["float32"] / BYTES[recipe.model.dtype])
        seconds["gathering keys"] = packed * width * (together - 1) / together / link_speed(device, together)
    if layout.ranks > 1:
        seconds["summing gradients"] = 2 * 4 * sizes.trained * share / speed
    if zero.offload_optimizer:  # gradients to the host, weights back
        seconds["updating on the host"] = 2 * 4 * sizes.trained / layout.ranks / to_host
    if rollout is not None and rollout.moves_to_host:  # to the host and back
        seconds["moving the engine's weights"] = 2 * engine_weights(recipe, sizes, rollout) / to_host
    if rollout is not None and rollout.lookahead:  # the next step's rollout continues while the learner computes
        seconds["rollout"] = max(0.0, seconds["rollout"] - seconds["learn"])
    return seconds


def rollout_seconds(recipe: BaseRecipe, sizes: ModelSizes, rollout: RolloutLoad, device: Device) -> float:
    """Estimate the seconds of one rank's engine, or of the engine that it shares. A decoding step reads the weights and
    all keys and values. With many rows at once, its matrix products take longer than reading."""
    shared = rollout.tensor_parallel
    flops = device.reached_flops * device.flops * shared
    bandwidth = device.reached_bandwidth * device.bandwidth
    width = BYTES[recipe.model.dtype]
    prompts = rollout.engine_prompts or rollout.prompts
    rows = prompts * rollout.group_size
    is_local = rollout.engine.shares_weights
    fitting = rollout.local_prompts * rollout.group_size if is_local else cached_rows(recipe, sizes, rollout)
    at_once = max(1, min(rows, fitting))
    prefill = 2 * prompts * rollout.prompt_tokens * sizes.active_weights / flops
    held = at_once * rollout.completion_tokens / 2 + at_once / rollout.group_size * rollout.prompt_tokens
    read = width * sizes.weights_used_by(at_once) / shared + cache_token_bytes(recipe, sizes, shared) * held
    read += sizes.dequantising_bytes(width) if is_local else 0
    computed = 2 * at_once * sizes.active_weights / flops
    summed = 0.0
    if shared > 1:  # after the attention and after the MLP of each layer
        moved = 2 * width * at_once * sizes.hidden * (shared - 1) / shared
        summed = 2 * sizes.layers * (moved / link_speed(device, shared) + REDUCE_SECONDS)
    waves = -(-rows // at_once)
    return prefill + waves * rollout.completion_tokens * (max(read / bandwidth, computed) + summed)
