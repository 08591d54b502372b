"""What metrics.jsonl says about a step besides its loss and its rewards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from tiercel.algorithms import advantage_of
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.models.layers.attention import attention_spans_of, heads_of
from tiercel.models.layers.experts import ExpertLayer, experts_of_a_token, mixtures
from tiercel.models.policy import Policy
from tiercel.packing.layout import PackedTokens, PackItem, pack
from tiercel.packing.tree import groups_tree
from tiercel.planning.devices import known_device
from tiercel.rewards.runtime.metrics import reward_statistics
from tiercel.training.policy_passes import PolicyPasses
from tiercel.types import Completion, ScoredGroup

ATTENTION_PRODUCTS = 6


def update_operations(policy: Policy, form: str, packed: PackedTokens) -> float:
    """Count the operations of one forward and backward pass over a pack."""
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
    tree, windows = packed.tree, per_pair.keys()
    if form == "repeated":
        tokens, rows = packed.repeated_length, [groups_tree((len(tree.places(end)),)) for end in packed.ends_C]
        pairs = {window: sum(row.seen_pairs(window) for row in rows) for window in windows}
    else:
        tokens, pairs = tree.length, {window: tree.seen_pairs(window) for window in windows}
    attention = sum(each * pairs[window] for window, each in per_pair.items())
    return per_token * tokens + per_scored * len(packed.targets_N) + attention


def _per_pair(config: Any) -> Mapping[int | None, int]:
    """Count the attention operations for a pair of tokens, summed over the layers with the same window. `config` is the
    decoder's."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    sights = attention_spans_of(config)
    per_pair: Counter[int | None] = Counter()
    for heads, kind in zip(heads_of(config), kinds, strict=False):
        if kind in sights:  # a delta net has none
            per_pair[sights[kind].window] += 2 * ATTENTION_PRODUCTS * config.num_attention_heads * heads.size
    return per_pair


def _per_token(linear: nn.Linear) -> int:
    """Count from the shapes that the module remembers, because a sharded weight is smaller."""
    products = 3 if linear.weight.requires_grad else 2
    return 2 * products * linear.in_features * linear.out_features


def _of_experts(mixture: ExpertLayer, config: Any) -> int:
    """Count the operations of the three products of each expert that a token uses, and of the router. `config` is the
    decoder's."""
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    products = 3 if any(parameter.requires_grad for parameter in mixture.block.experts.parameters()) else 2
    chosen = 3 * products * experts_of_a_token(config) * width
    return 2 * config.hidden_size * (chosen + 2 * mixture.count)


def rollout_metrics(step: int, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> dict[str, float]:
    """Describe what the step after this many updates learnt from: rewards, completions, and which policy drew them.
    `scored` has the groups of all ranks; rewards are those of completions that the policy drew."""
    drawn = [group for group in scored if not group.group.is_of_row]
    least = advantage_of(recipe.algorithm.advantage).least_group if recipe.learns_from_rewards else 0
    return {
        **(reward_statistics(drawn, least) if recipe.rewards and drawn else {}),
        **_completion_metrics(scored),
        **_version_metrics(step, scored),
    }


def _completion_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Summarise lengths and truncation of the step's completions."""
    completions = [completion.completion for group in scored for completion in group.completions]
    tokens = sum(completion.sampled_count for completion in completions)
    truncated = sum(completion.is_truncated for completion in completions)
    return {
        "completion/tokens_mean": tokens / max(1, len(completions)),
        "completion/truncated_fraction": truncated / max(1, len(completions)),
        "tokens/prompt": sum(len(group.group.prompt.token_ids_P) for group in scored),
        "tokens/completion": tokens,
        **_turn_metrics(completions),
    }


def _turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Summarise turns and tool calls; empty without tools and environments. `tokens/observed` counts the tokens that
    came back from them."""
    trajectories = [each.trajectory for each in completions if each.trajectory is not None]
    if not trajectories:
        return {}
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    calls = [call for turn in turns for call in turn.calls]
    counts = Counter(call.name for call in calls if call.is_known)
    return {
        "turns/mean": len(turns) / len(trajectories),
        "tokens/observed": sum(len(each.token_ids_L) - each.sampled_count for each in completions),
        **{f"tools/{name}/calls": counts[name] for name in sorted(counts)},
        "tools/failed_fraction": sum(call.failure is not None for call in calls) / max(1, len(calls)),
        "environment/failed": sum(trajectory.failure is not None for trajectory in trajectories),
    }


def _version_metrics(step: int, scored: Sequence[ScoredGroup]) -> dict[str, int]:
    """Return the oldest policy that the step learnt from, and how many versions it is behind."""
    version = min((group.group.policy_version for group in scored), default=step)
    return {"policy_version": version, "sampler/staleness": step - version}


def memory_metrics(ranks: Ranks, device: torch.device) -> dict[str, int]:
    """Return the most memory that a rank used: of its GPU since the last call, or else of its process so far."""
    return {"memory/peak_bytes": ranks.all_reduce_max(_peak_memory(device))}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0


def utilisation_metrics(
    passes: PolicyPasses, items: Sequence[PackItem], seconds: float, epochs: int = 1
) -> dict[str, float]:
    """Return `mfu`: the operations that the updates need (`update_operations`) divided by what the devices of all ranks
    can do in the seconds that the learner took. Empty if a device is not known, and on CPUs. `items` are this rank's,
    learnt from `epochs` times. All of them count as one tree, so what several microbatches compute counts once."""
    device = known_device(_card_name(passes.policy.device))
    needed = 0.0
    if device is not None and items:
        packed = pack(items, passes.sharing_family)
        needed = epochs * update_operations(passes.policy, passes.learner.form, packed)
    sums = passes.ranks.all_reduce_sums(
        {
            "operations": needed,
            "possible": seconds * device.flops if device else 0.0,
            "unknown": device is None,
        }
    )
    return {} if sums["unknown"] else {"mfu": sums["operations"] / sums["possible"]}


def _card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
