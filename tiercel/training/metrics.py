"""What metrics.jsonl says of a step beside its loss and its rewards."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch

from tiercel.algorithms import advantage_of
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.learner.layout import PackItem
from tiercel.planning.devices import known_device
from tiercel.scoring.metrics import reward_statistics
from tiercel.training.forward import Passes
from tiercel.training.operations import update_operations
from tiercel.types import Completion, ScoredGroup


def rollout_metrics(step: int, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> dict[str, float]:
    """Describe what the step after so many updates learnt from: rewards, completions, and which policy drew them.
    `scored`: the groups of all ranks."""
    return {
        **(reward_statistics(scored, advantage_of(recipe.algorithm.advantage).least_group) if recipe.rewards else {}),
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
    """Summarise turns and tool calls; empty without tools and environments. `tokens/observed` are those that came
    back."""
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
    """Tell the oldest policy that the step learnt from, and how many versions it is behind."""
    version = min((group.group.policy_version for group in scored), default=step)
    return {"policy_version": version, "sampler/staleness": step - version}


def memory_metrics(ranks: Ranks, device: torch.device) -> dict[str, int]:
    """Tell the most memory that a rank used: of its GPU since the last call, else of its process so far."""
    return {"memory/peak_bytes": ranks.largest(_peak_memory(device))}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    with suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return 0


def utilisation_metrics(passes: Passes, items: Sequence[PackItem], seconds: float) -> dict[str, float]:
    """Tell `mfu`: the operations that the updates need (operations.py) over what the cards of all ranks can do in the
    seconds that the learner took. Nothing where a card is not known, and on CPUs. `items`: of this rank, once for each
    time that they are learnt from."""
    device = known_device(_card_name(passes.policy.device))
    sums = passes.ranks.sum(
        {
            "operations": update_operations(passes.policy, passes.learner.form, items),
            "possible": seconds * device.flops if device else 0.0,
            "unknown": device is None,
        }
    )
    return {} if sums["unknown"] else {"mfu": sums["operations"] / sums["possible"]}


def _card_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
