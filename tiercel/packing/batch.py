"""Microbatches under a token budget, built from scored groups or conversations. Shape suffixes: docs/shapes.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.errors import DataError
from tiercel.models.prompts import completion_positions
from tiercel.packing.cutting import Bin, TreeCutter, prefix_cuts, together
from tiercel.packing.divergence import TeacherTokens
from tiercel.packing.layout import Continuation, PackedTokens, PackItem, add_item, pack
from tiercel.packing.sharing import PictureFamily, TreeBuilder
from tiercel.packing.tree import groups_tree
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Row, ScoredGroup

T = TypeVar("T")
Batch = TypeVar("Batch", bound="Microbatch")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionName:
    """The identity of a completion within a step."""

    row: str  # id of the prompt's row
    index: int  # the prompt's index in the global order
    number: int  # the place in its group, from 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageGroup:
    """The completions of a group that have an advantage."""

    item: PackItem
    numbers: tuple[int, ...]  # the places of the completions in their group
    advantages_G: Tensor  # fp32
    sampler_logprobs: tuple[Tensor, ...]  # fp32 (L,) for each completion, from the engine that sampled it
    old_logprobs: tuple[Tensor, ...] | None = None  # fp32 (L,), from the learner's policy; None: not computed yet
    teacher: tuple[TeacherTokens, ...] | None = None  # for each completion; None without a teacher

    @property
    def names(self) -> list[CompletionName]:
        """Return the names of the completions."""
        prompt = self.item.prompt
        return [CompletionName(row=prompt.row.id, index=prompt.index, number=number) for number in self.numbers]

    def part(self, start: int, stop: int) -> "AdvantageGroup":
        """Return a group with the completions from `start` up to, but not including, `stop`, and the whole prompt."""
        return AdvantageGroup(
            item=replace(self.item, continuations=self.item.continuations[start:stop]),
            numbers=self.numbers[start:stop],
            advantages_G=self.advantages_G[start:stop],
            sampler_logprobs=self.sampler_logprobs[start:stop],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[start:stop],
            teacher=None if self.teacher is None else self.teacher[start:stop],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Packed rows that go through the learner together."""

    packed: PackedTokens
    prompt_ids: tuple[str, ...]  # of the rows; none in an empty pass


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyBatch(Microbatch):
    """One microbatch of a policy update."""

    rows: tuple[int, ...]  # the places of its completions among those of all groups
    advantages_C: Tensor  # fp32
    sampler_logprobs_N: Tensor  # fp32, from the engine that sampled
    old_logprobs_N: Tensor | None = None  # fp32, from the learner's policy; None: not computed yet
    teacher: TeacherTokens | None = None  # None without a teacher
    totals: Totals  # over the whole minibatch and all ranks
    names_C: tuple[CompletionName, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPrefix:
    """The beginning of several microbatches, which a pass of its own computes."""

    packed: PackedTokens  # without rows; if this prefix continues another, that is its first node
    first: int  # the microbatches from `first` up to, but not including, `stop` continue it
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchUnit(Generic[Batch]):
    """Microbatches that run together: a single one, or the parts of a tree that is too large for one."""

    batches: tuple[Batch, ...]
    prefixes: tuple[PolicyPrefix, ...] = ()  # outer ones before those that continue them

    def opening(self, number: int) -> list[PolicyPrefix]:
        """Return the prefixes that are computed just before a microbatch, in order."""
        return [each for each in self.prefixes if each.first == number]

    def computed(self, number: int) -> int:
        """Count the tokens that a microbatch computes, together with those of the prefixes that open with it."""
        before = [each.packed.tree.length for each in self.prefixes if each.first < number < each.stop]
        return self.batches[number].packed.tree.length - max(before, default=0)

    @property
    def images_of_passes(self) -> list[tuple[EncodedImage, ...]]:
        """Return, for each pass of the unit, the images whose vision features it needs."""
        return [
            packed.images
            for number, batch in enumerate(self.batches)
            for packed in (*(each.packed for each in self.opening(number)), batch.packed)
        ]


def advantage_groups(
    scored: Sequence[ScoredGroup],
    advantages: Sequence[Sequence[float | None]],
    old_logprobs: Mapping[int, Sequence[Tensor]] | None = None,
) -> list[AdvantageGroup]:
    """Build groups from the completions that have an advantage, leaving out groups that have none. `old_logprobs`, if
    they were computed before, are keyed by the prompt's index and cover every completion that has a total."""
    groups = []
    for group, values in zip(scored, advantages, strict=True):
        prompt = group.group.prompt
        numbers = tuple(number for number, value in enumerate(values) if value is not None)
        if not numbers:
            continue
        completions = [group.completions[number].completion for number in numbers]
        made = replace(advantage_group(prompt, completions, [values[number] for number in numbers]), numbers=numbers)
        if old_logprobs is not None:
            scorable = [number for number, each in enumerate(group.completions) if each.total is not None]
            old = dict(zip(scorable, old_logprobs.get(prompt.index, ()), strict=False))
            made = replace(made, old_logprobs=tuple(old[number] for number in numbers if number in old))
        groups.append(made)
    return groups


def advantage_group(
    prompt: EncodedPrompt, completions: Sequence[Completion], advantages: Sequence[float | None]
) -> AdvantageGroup:
    """Build a group from completions of a prompt, each with its advantage."""
    return AdvantageGroup(
        item=group_item(prompt, completions),
        numbers=tuple(range(len(completions))),
        advantages_G=torch.tensor(advantages, dtype=torch.float32),
        sampler_logprobs=tuple(completion.sampled_logprobs for completion in completions),
    )


def group_item(prompt: EncodedPrompt, completions: Sequence[Completion]) -> PackItem:
    """Build an item from a prompt and its completions. All tokens that the policy sampled are scored."""
    return PackItem(prompt=prompt, continuations=tuple(_continuation(prompt, each) for each in completions))


def _continuation(prompt: EncodedPrompt, completion: Completion) -> Continuation:
    turns, length = completion.trajectory, len(completion.token_ids_L)
    return Continuation(
        token_ids_L=completion.token_ids_L,
        positions_DL=completion_positions(prompt.positions_DP, length) if turns is None else turns.positions_DL,
        is_scored_L=completion.is_sampled_L,
        picture_spans=() if turns is None else turns.picture_spans,
        images=() if turns is None else turns.images,
    )


def without_zero_groups(groups: Sequence[AdvantageGroup], *, keeps_nan: bool) -> list[AdvantageGroup]:
    """Keep the groups that have a nonzero advantage. The others add exactly 0 to a loss without further terms, but the
    minibatch's totals still count them. With `keeps_nan` a group with a logprob that is NaN is kept, because it was
    sampled from logits that are not finite, which the update detects; other engines write NaN for tokens whose logprob
    they do not know."""
    return [group for group in groups if bool(group.advantages_G.any()) or (keeps_nan and _has_nan(group))]


def _has_nan(group: AdvantageGroup) -> bool:
    return any(bool(logprobs.isnan().any()) for logprobs in group.sampler_logprobs)


def totals_of(groups: Sequence[AdvantageGroup]) -> Totals:
    """Count tokens, completions and groups, which are this rank's share of the minibatch's normalisers."""
    return Totals(
        tokens=sum(len(logprobs) for group in groups for logprobs in group.sampler_logprobs),
        completions=sum(len(group.sampler_logprobs) for group in groups),
        groups=len(groups),
    )


def policy_units(
    groups: Sequence[AdvantageGroup],
    totals: Totals,
    form: str,
    budget: int,
    may_run_prefix: bool,
    family: PictureFamily | None = None,
) -> list[MicrobatchUnit[PolicyBatch]]:
    """Build the microbatches of groups, as `units_of` does. Completions of a group share its prompt; with `family`,
    groups that begin alike share that beginning."""
    if not groups:
        return []
    rows = [group.part(place, place + 1) for group in groups for place in range(len(group.numbers))]
    entries = [(row.item.prompt.row.id, (number,)) for number, row in enumerate(rows)]
    batch_of = partial(_policy_batch, rows=rows, totals=totals)
    return units_of(pack([group.item for group in groups], family), entries, form, budget, may_run_prefix, batch_of)


def units_of(
    whole: PackedTokens,
    entries: Sequence[tuple[str, Sequence[int]]],
    form: str,
    budget: int,
    may_run_prefix: bool,
    batch_of: Callable[[PackedTokens, tuple[int, ...]], Batch],
) -> list[MicrobatchUnit[Batch]]:
    """Cut a pack into microbatches of at most `budget` tokens. An entry is a row's id and those of its continuations
    that stay together. `batch_of` makes a microbatch from the pack of some entries and their numbers. A tree that does
    not fit is cut at its nodes; if `may_run_prefix`, its parts share passes over their prefixes, and otherwise each
    part contains them. Raises DataError if an entry does not fit on its own."""
    ends = [[whole.ends_C[number] for number in numbers] for _, numbers in entries]
    tree = whole.tree
    if form == "repeated":  # as if each entry were a root of its own
        tree = groups_tree(*([sum(map(tree.length_to, each))] for each in ends))
        ends = [[entry] for entry in range(len(entries))]
    cutter = TreeCutter(tree, ends, budget)
    for (row_id, _), nodes in zip(entries, cutter.nodes, strict=True):
        if (size := cutter.size(nodes)) > budget:
            raise DataError(
                f"row {row_id}: {size} tokens exceed learner.max_tokens_per_microbatch = {budget}; "
                "raise it, or lower data.max_prompt_tokens",
                field="messages",
            )

    def microbatch(each: Bin) -> Batch:
        rows = [number for entry in each.entries for number in entries[entry][1]]
        return batch_of(whole.only(rows, each.above), each.entries)

    bins = cutter.bins() if may_run_prefix else (Bin(each.entries) for each in cutter.bins())
    return [
        MicrobatchUnit(
            batches=tuple(map(microbatch, unit)),
            prefixes=tuple(
                PolicyPrefix(packed=whole.prefix(path), first=first, stop=stop)
                for path, first, stop in prefix_cuts(unit)
            ),
        )
        for unit in together(bins)
    ]


def in_completion_order(units: Sequence[MicrobatchUnit[PolicyBatch]], values: Sequence[T]) -> list[T]:
    """Bring values of all completions of the units into the order of the groups. Those of empty units come last, and
    are left out."""
    rows = [row for unit in units for batch in unit.batches for row in batch.rows]
    return [value for _, value in sorted(zip(rows, values, strict=False), key=lambda pair: pair[0])]


def empty_item(dimensions: int, token_id: int) -> PackItem:
    """Build an item of two tokens, neither of them scored. A rank runs it so that all ranks make the same number of
    passes. Its loss is 0 but part of the graph, so its backward pass runs through every layer."""
    prompt = prompt_of_no_row(torch.tensor([token_id]), torch.zeros(dimensions, 1, dtype=torch.int64))
    continuation = Continuation(
        token_ids_L=torch.tensor([token_id]),
        positions_DL=torch.ones(dimensions, 1, dtype=torch.int64),
        is_scored_L=torch.zeros(1, dtype=torch.bool),
    )
    return PackItem(prompt=prompt, continuations=(continuation,))


def prompt_of_no_row(token_ids_P: Tensor, positions_DP: Tensor) -> EncodedPrompt:
    """Build a prompt from tokens that do not come from a row."""
    row = Row(id="(none)", messages=(), columns={}, file="", line=0)
    return EncodedPrompt(row=row, index=-1, text="", token_ids_P=token_ids_P, positions_DP=positions_DP, images=())


def empty_unit(item: PackItem, totals: Totals) -> MicrobatchUnit[PolicyBatch]:
    """Build a unit from the result of `empty_item`."""
    batch = PolicyBatch(
        packed=pack([item]),
        rows=(),
        advantages_C=torch.zeros(1),
        sampler_logprobs_N=torch.empty(0),
        totals=totals,
        prompt_ids=(),
        names_C=(),
    )
    return MicrobatchUnit(batches=(batch,))


def _policy_batch(
    packed: PackedTokens, numbers: tuple[int, ...], rows: Sequence[AdvantageGroup], totals: Totals
) -> PolicyBatch:
    """Build the microbatch of the rows with these numbers; each of `rows` is a group of one completion."""
    own = [rows[number] for number in numbers]
    prompts = {row.item.prompt.index: row.item.prompt.row.id for row in own}
    return PolicyBatch(
        packed=packed,
        rows=numbers,
        advantages_C=torch.cat([row.advantages_G for row in own]),
        sampler_logprobs_N=torch.cat([logprobs for row in own for logprobs in row.sampler_logprobs]),
        old_logprobs_N=_old_logprobs(own),
        teacher=_teacher(own),
        totals=totals,
        prompt_ids=tuple(prompts.values()),
        names_C=tuple(name for row in own for name in row.names),
    )


def _old_logprobs(groups: Sequence[AdvantageGroup]) -> Tensor | None:
    """Return the old logprobs (N,), or None if a group has none."""
    rows = [row for group in groups for row in group.old_logprobs or ()]
    return None if any(group.old_logprobs is None for group in groups) else torch.cat(rows)


def _teacher(groups: Sequence[AdvantageGroup]) -> TeacherTokens | None:
    parts = [part for group in groups for part in group.teacher or ()]
    return TeacherTokens.joined(parts) if parts else None


class TokenCounter:
    """The tokens that a form computes for the items of a bin."""

    def __init__(self, form: str, family: PictureFamily | None):
        self.form = form
        self.repeated = 0
        self.builder = TreeBuilder(family)

    def with_items(self, items: Sequence[PackItem]) -> int:
        """Add items, and count the tokens of all of them."""
        for item in items:
            if self.form == "repeated":
                self.repeated += item.repeated_length
            else:
                add_item(self.builder, item)
        return self.repeated + self.builder.length
