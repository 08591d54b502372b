"""From scored groups or conversations to microbatches under a token budget.

Shape suffixes: G scorable completions of a group, C tokens of one continuation (in `Continuation`) or completions of
a microbatch (in `PolicyBatch`), N scored tokens of a microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.errors import DataError
from tiercel.learner.forms import CONTINUES_A_PREFIX, packed_length
from tiercel.learner.layout import Continuation, PackedTokens, PackItem, pack
from tiercel.models.prompts import completion_positions
from tiercel.types import Completion, EncodedConversation, EncodedImage, EncodedPrompt, Row, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageGroup:
    """A group's completions that are learnt from."""

    item: PackItem
    advantages_G: Tensor  # fp32
    sampler_logprobs: tuple[Tensor, ...]  # per completion, fp32 (C,)
    old_logprobs: tuple[Tensor, ...] | None = None  # likewise, of the learner's policy; None: not computed yet

    def part(self, start: int, stop: int) -> "AdvantageGroup":
        """Some of the completions, with the whole prompt."""
        return AdvantageGroup(
            item=replace(self.item, continuations=self.item.continuations[start:stop]),
            advantages_G=self.advantages_G[start:stop],
            sampler_logprobs=self.sampler_logprobs[start:stop],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch:
    """One microbatch of a policy update."""

    packed: PackedTokens
    advantages_C: Tensor  # fp32, one per completion
    sampler_logprobs_N: Tensor  # fp32, from the engine that sampled
    old_logprobs_N: Tensor | None = None  # fp32, of the learner's policy; None: not computed yet
    totals: Totals  # of the whole minibatch over all ranks
    prompt_ids: tuple[str, ...]
    row_of_C: tuple[str, ...]  # whose id to name where a completion's number is not finite


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyUnit:
    """Microbatches that go through the learner together: one, or the parts of a group that none can hold."""

    prefix: PackedTokens | None  # the prompt that the parts share, to be run once
    batches: tuple[PolicyBatch, ...]

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """Pictures whose features the unit's passes take."""
        return self.batches[0].packed.images if self.prefix is None else self.prefix.images


def advantage_groups(
    scored: Sequence[ScoredGroup],
    advantages: Sequence[Sequence[float | None]],
    old_logprobs: Mapping[int, Sequence[Tensor]] | None = None,
) -> list[AdvantageGroup]:
    """Groups with their completions that have an advantage; a group without any is left out. `old_logprobs`: where they
    were computed already, by the prompt's index, for every completion that has a total."""
    groups = []
    for group, values in zip(scored, advantages, strict=True):
        prompt = group.group.prompt
        old = iter(() if old_logprobs is None else old_logprobs.get(prompt.index, ()))
        old_of = [next(old, None) if each.total is not None else None for each in group.completions]
        learnt = [
            (each.completion, value, known)
            for each, value, known in zip(group.completions, values, old_of, strict=True)
            if value is not None
        ]
        if not learnt:
            continue
        known_old = tuple(known for _, _, known in learnt if known is not None)
        groups.append(
            AdvantageGroup(
                item=group_item(prompt, [completion for completion, _, _ in learnt]),
                advantages_G=torch.tensor([value for _, value, _ in learnt], dtype=torch.float32),
                sampler_logprobs=tuple(completion.logprobs_L for completion, _, _ in learnt),
                old_logprobs=None if old_logprobs is None else known_old,
            )
        )
    return groups


def group_item(prompt: EncodedPrompt, completions: Sequence[Completion]) -> PackItem:
    """A prompt with completions of it, all tokens of which are scored."""
    continuations = tuple(
        Continuation(
            token_ids_L=completion.token_ids_L,
            positions_DL=completion_positions(prompt.positions_DP, len(completion.token_ids_L)),
            is_scored_L=torch.ones(len(completion.token_ids_L), dtype=torch.bool),
        )
        for completion in completions
    )
    return PackItem(prompt=prompt, continuations=continuations)


def without_zero_groups(groups: Sequence[AdvantageGroup]) -> list[AdvantageGroup]:
    """Groups with an advantage other than 0. The others add exactly nothing to a loss without another term; the
    minibatch's totals still count them."""
    return [group for group in groups if bool(group.advantages_G.any())]


def totals_of(groups: Sequence[AdvantageGroup]) -> Totals:
    """This rank's share of the minibatch's normalisers."""
    return Totals(
        tokens=sum(len(logprobs) for group in groups for logprobs in group.sampler_logprobs),
        completions=sum(len(group.sampler_logprobs) for group in groups),
        groups=len(groups),
    )


def policy_units(
    groups: Sequence[AdvantageGroup], totals: Totals, form: str, budget: int, may_run_prefix: bool
) -> list[PolicyUnit]:
    """Microbatches of whole groups, in order. A group larger than the budget is cut between completions; its parts
    share one pass over the prompt where the form can and `may_run_prefix`, else each carries the prompt."""
    units: list[PolicyUnit] = []
    fitting: list[AdvantageGroup] = []

    def flush() -> None:
        for bin_ in packed_bins([group.item for group in fitting], form, budget):
            batch = _policy_batch([fitting[i] for i in bin_], totals)
            units.append(PolicyUnit(prefix=None, batches=(batch,)))
        fitting.clear()

    for group in groups:
        parts = _cut(group, form, budget)
        if len(parts) > 1 and may_run_prefix and form in CONTINUES_A_PREFIX:
            flush()
            packed_bins([part.item for part in parts], form, budget)  # refuses a completion that fits nowhere
            prefix = pack([replace(group.item, continuations=())])
            units.append(PolicyUnit(prefix=prefix, batches=tuple(_policy_batch([part], totals) for part in parts)))
        else:
            fitting += parts
    flush()
    return units


def empty_item(dimensions: int, token_id: int) -> PackItem:
    """Two tokens and none of them scored: what a rank computes so that all ranks make as many passes. Its loss is 0
    and hangs on the graph, so that its backward pass visits every layer."""
    row = Row(id="(none)", messages=(), columns={}, file="", line=0)
    prompt = EncodedPrompt(
        row=row,
        index=-1,
        text="",
        token_ids_P=torch.tensor([token_id]),
        positions_DP=torch.zeros(dimensions, 1, dtype=torch.int64),
        images=(),
    )
    continuation = Continuation(
        token_ids_L=torch.tensor([token_id]),
        positions_DL=torch.ones(dimensions, 1, dtype=torch.int64),
        is_scored_L=torch.zeros(1, dtype=torch.bool),
    )
    return PackItem(prompt=prompt, continuations=(continuation,))


def empty_unit(item: PackItem, totals: Totals) -> PolicyUnit:
    """`empty_item` as a unit of a minibatch."""
    batch = PolicyBatch(
        packed=pack([item]),
        advantages_C=torch.zeros(1),
        sampler_logprobs_N=torch.empty(0),
        totals=totals,
        prompt_ids=(),
        row_of_C=(),
    )
    return PolicyUnit(prefix=None, batches=(batch,))


def _policy_batch(groups: Sequence[AdvantageGroup], totals: Totals) -> PolicyBatch:
    return PolicyBatch(
        packed=pack([group.item for group in groups]),
        advantages_C=torch.cat([group.advantages_G for group in groups]),
        sampler_logprobs_N=torch.cat([row for group in groups for row in group.sampler_logprobs]),
        old_logprobs_N=_old_logprobs(groups),
        totals=totals,
        prompt_ids=tuple(group.item.prompt.row.id for group in groups),
        row_of_C=tuple(group.item.prompt.row.id for group in groups for _ in group.item.continuations),
    )


def _old_logprobs(groups: Sequence[AdvantageGroup]) -> Tensor | None:
    """(N,); None unless every group has them."""
    rows = [row for group in groups for row in group.old_logprobs or ()]
    return None if any(group.old_logprobs is None for group in groups) else torch.cat(rows)


def conversation_item(conversation: EncodedConversation) -> PackItem:
    """An SFT conversation: its prompt with one continuation."""
    continuation = Continuation(
        token_ids_L=conversation.token_ids_L,
        positions_DL=conversation.positions_DL,
        is_scored_L=conversation.is_scored_L,
    )
    return PackItem(prompt=conversation.prompt, continuations=(continuation,))


def packed_bins(items: Sequence[PackItem], form: str, budget: int) -> list[list[int]]:
    """Places of the items, in order, cut where the budget of tokens would be exceeded. Raises DataError for an item
    that does not fit alone."""
    bins: list[list[int]] = []
    room = 0
    for i, item in enumerate(items):
        length = packed_length(item, form)
        if length > budget:
            raise DataError(
                f"row {item.prompt.row.id}: {length} tokens are more than learner.max_tokens_per_microbatch = "
                f"{budget}; raise it, or lower data.max_prompt_tokens",
                field="messages",
            )
        if not bins or length > room:
            bins.append([])
            room = budget
        bins[-1].append(i)
        room -= length
    return bins


def _cut(group: AdvantageGroup, form: str, budget: int) -> list[AdvantageGroup]:
    """The group itself where it fits, else runs of its completions, each with the prompt."""
    if packed_length(group.item, form) <= budget:
        return [group]
    bounds = [0]
    continuations = group.item.continuations
    for i in range(1, len(continuations) + 1):
        candidate = replace(group.item, continuations=continuations[bounds[-1] : i])
        if packed_length(candidate, form) > budget and i - 1 > bounds[-1]:
            bounds.append(i - 1)
    bounds.append(len(continuations))
    return [group.part(start, stop) for start, stop in pairwise(bounds)]
