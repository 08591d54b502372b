"""Sharing of a group's completions among ranks in a step with fewer prompts than ranks, so that no rank is idle.

Sample i of a prompt is drawn with the prompt's seed + i, whichever rank draws it, so the groups are the same as on one
rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tiercel.distributed.ranks import Ranks
from tiercel.packing.batch import AdvantageGroup
from tiercel.rollout.pending import PendingGroup
from tiercel.types import EncodedPrompt, Group

Draw = Callable[[Sequence[EncodedPrompt], range], Sequence[Group]]  # these completions of each prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSlice:
    """Completions of one prompt that one rank draws."""

    owner: int  # the rank that holds the prompt
    place: int  # of the prompt on that rank
    rank: int  # that draws
    numbers: range  # of the completions in their group


def group_parts(prompts_of_ranks: Sequence[int], group_size: int) -> list[GroupSlice]:
    """Share the groups of fewer prompts than ranks among all ranks, in the order of prompts and completions. Each rank
    draws at most one portion; if groups are smaller than their share of the ranks, some draw none."""
    ranks, prompts = len(prompts_of_ranks), sum(prompts_of_ranks)
    homes = [(owner, place) for owner, count in enumerate(prompts_of_ranks) for place in range(count)]
    found = []
    for number, (owner, place) in enumerate(homes):
        drawing = range(-(-ranks * number // prompts), -(-ranks * (number + 1) // prompts))
        parts = even_ranges(group_size, len(drawing))
        found += [
            GroupSlice(owner=owner, place=place, rank=rank, numbers=part)
            for rank, part in zip(reversed(drawing), parts, strict=False)
        ]
    return found


def even_ranges(count: int, parts: int) -> list[range]:
    """Split 0 to `count` - 1 into runs whose lengths differ by at most one; no run is empty."""
    parts = min(count, parts)
    return [range(*ends) for ends in pairwise(count * number // parts for number in range(parts + 1))]


def sample_on_all_ranks(
    ranks: Ranks, prompts: Sequence[EncodedPrompt], group_size: int, draw: Draw
) -> tuple[Group, ...]:
    """Draw whole groups for this rank's prompts; if there are fewer prompts than ranks, all ranks draw a part."""
    counts = ranks.all_gather(len(prompts))
    if not 0 < sum(counts) < ranks.world_size:
        return tuple(ranks.run_on_all(lambda: draw(prompts, range(group_size))))
    shares = group_parts(counts, group_size)
    here = {number: prompts[each.place] for number, each in enumerate(shares) if each.owner == ranks.rank}
    there = ranks.send([(each.owner, each.rank) for each in shares], here)
    own = next((number for number, each in enumerate(shares) if each.rank == ranks.rank), None)
    asked, numbers = ([], range(group_size)) if own is None else ([there[own]], shares[own].numbers)
    drawn = ranks.run_on_all(lambda: draw(asked, numbers))
    back = {} if own is None else {own: PendingGroup.of(drawn[0])}
    parts = ranks.send([(each.rank, each.owner) for each in shares], back)

    def joined(place: int, prompt: EncodedPrompt) -> Group:
        of_prompt = [part for number, part in parts.items() if shares[number].place == place]
        completions = tuple(completion for part in of_prompt for completion in part.completions)
        return Group(prompt=prompt, completions=completions, policy_version=of_prompt[0].policy_version)

    return tuple(joined(place, prompt) for place, prompt in enumerate(prompts))


def split_across_ranks(ranks: Ranks, groups: Sequence[AdvantageGroup], data_parallel_size: int) -> list[AdvantageGroup]:
    """Return this rank's groups, cut into parts that can be balanced if all ranks together have fewer groups than
    `data_parallel_size`: the ranks, or the groups of ranks that compute packs together. Each part has the prompt."""
    total = sum(ranks.all_gather(len(groups)))
    if not 0 < total < data_parallel_size:
        return list(groups)
    return [
        group.part(part.start, part.stop)
        for group in groups
        for part in even_ranges(len(group.sampler_logprobs), -(-data_parallel_size // total))
    ]
