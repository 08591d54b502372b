"""Microbatches under a token budget, built from scored groups or conversations. Shape suffixes: docs/shapes.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.errors import DataError
from tiercel.models.prompts import completion_positions
from tiercel.packing.divergence import TeacherTokens
from tiercel.packing.forms import CONTINUES_A_PREFIX, packed_length
from tiercel.packing.layout import Continuation, PackedTokens, PackItem, add_item, pack
from tiercel.packing.sharing import PictureFamily, TreeBuilder
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Row, ScoredGroup


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
class PolicyBatch:
    """One microbatch of a policy update."""

    packed: PackedTokens
    advantages_C: Tensor  # fp32
    sampler_logprobs_N: Tensor  # fp32, from the engine that sampled
    old_logprobs_N: Tensor | None = None  # fp32, from the learner's policy; None: not computed yet
    teacher: TeacherTokens | None = None  # None without a teacher
    totals: Totals  # over the whole minibatch and all ranks
    prompt_ids: tuple[str, ...]
    names_C: tuple[CompletionName, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyUnit:
    """Microbatches that run together: a single one, or the parts of a group that is too large for one."""

    prefix: PackedTokens | None  # the prompt that the parts share, run only once
    batches: tuple[PolicyBatch, ...]

    @property
    def images_of_passes(self) -> list[tuple[EncodedImage, ...]]:
        """Return, for each pass of the unit, the images whose vision features it needs."""
        prefix = () if self.prefix is None else (self.prefix.images,)
        return [*prefix, *(batch.packed.images for batch in self.batches)]


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
        old = iter(() if old_logprobs is None else old_logprobs.get(prompt.index, ()))
        old_of = [next(old, None) if each.total is not None else None for each in group.completions]
        numbers = tuple(number for number, value in enumerate(values) if value is not None)
        if not numbers:
            continue
        completions = [group.completions[number].completion for number in numbers]
        made = replace(advantage_group(prompt, completions, [values[number] for number in numbers]), numbers=numbers)
        known_old = tuple(known for number in numbers if (known := old_of[number]) is not None)
        groups.append(made if old_logprobs is None else replace(made, old_logprobs=known_old))
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
    trajectory = completion.trajectory
    if trajectory is None:
        return Continuation(
            token_ids_L=completion.token_ids_L,
            positions_DL=completion_positions(prompt.positions_DP, len(completion.token_ids_L)),
            is_scored_L=completion.is_sampled_L,
        )
    return Continuation(
        token_ids_L=completion.token_ids_L,
        positions_DL=trajectory.positions_DL,
        is_scored_L=trajectory.is_sampled_L,
        picture_spans=trajectory.picture_spans,
        images=trajectory.images,
    )


def without_zero_groups(groups: Sequence[AdvantageGroup]) -> list[AdvantageGroup]:
    """Keep the groups that have a nonzero advantage. The others add exactly 0 to a loss without further terms, but the
    minibatch's totals still count them. A group sampled from logits that are not finite is kept, so that the update
    detects it."""
    return [group for group in groups if bool(group.advantages_G.any()) or _has_nan(group)]


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
) -> list[PolicyUnit]:
    """Build microbatches from whole groups, in order. A group larger than `budget` tokens is cut between completions.
    Its parts share one pass over the prompt if the form supports it and `may_run_prefix` is true; otherwise each part
    contains the prompt. With `family`, groups of a microbatch that begin alike share that beginning. Raises DataError
    if a completion and its prompt do not fit together."""
    units: list[PolicyUnit] = []
    fitting: list[AdvantageGroup] = []

    def flush() -> None:
        for bin_ in packed_bins([(group.item,) for group in fitting], form, budget, family):
            batch = _policy_batch([fitting[i] for i in bin_], totals, family)
            units.append(PolicyUnit(prefix=None, batches=(batch,)))
        fitting.clear()

    for group in groups:
        is_whole = TokenCounter(form, family).with_items([group.item]) <= budget
        parts = [group] if is_whole else _cut(group, form, budget)
        if len(parts) > 1 and may_run_prefix and form in CONTINUES_A_PREFIX:
            flush()
            packed_bins([(part.item,) for part in parts], form, budget)  # raises if a completion does not fit
            prefix = pack([replace(group.item, continuations=())])
            batches = tuple(_policy_batch([_without_prompt_images(part)], totals) for part in parts)
            units.append(PolicyUnit(prefix=prefix, batches=batches))
        else:
            fitting += parts
    flush()
    return units


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


def empty_unit(item: PackItem, totals: Totals) -> PolicyUnit:
    """Build a unit from the result of `empty_item`."""
    batch = PolicyBatch(
        packed=pack([item]),
        advantages_C=torch.zeros(1),
        sampler_logprobs_N=torch.empty(0),
        totals=totals,
        prompt_ids=(),
        names_C=(),
    )
    return PolicyUnit(prefix=None, batches=(batch,))


def _without_prompt_images(group: AdvantageGroup) -> AdvantageGroup:
    """Drop the prompt's pictures, because the prompt has a pass of its own."""
    return replace(group, item=replace(group.item, prompt=replace(group.item.prompt, images=())))


def _policy_batch(groups: Sequence[AdvantageGroup], totals: Totals, family: PictureFamily | None = None) -> PolicyBatch:
    return PolicyBatch(
        packed=pack([group.item for group in groups], family),
        advantages_C=torch.cat([group.advantages_G for group in groups]),
        sampler_logprobs_N=torch.cat([row for group in groups for row in group.sampler_logprobs]),
        old_logprobs_N=_old_logprobs(groups),
        teacher=_teacher(groups),
        totals=totals,
        prompt_ids=tuple(group.item.prompt.row.id for group in groups),
        names_C=tuple(name for group in groups for name in group.names),
    )


def _old_logprobs(groups: Sequence[AdvantageGroup]) -> Tensor | None:
    """Return the old logprobs (N,), or None if a group has none."""
    rows = [row for group in groups for row in group.old_logprobs or ()]
    return None if any(group.old_logprobs is None for group in groups) else torch.cat(rows)


def _teacher(groups: Sequence[AdvantageGroup]) -> TeacherTokens | None:
    parts = [part for group in groups for part in group.teacher or ()]
    return TeacherTokens.joined(parts) if parts else None


def packed_bins(
    entries: Sequence[Sequence[PackItem]], form: str, budget: int, family: PictureFamily | None = None
) -> list[list[int]]:
    """Divide entries, whose items stay together, into bins of at most `budget` tokens, in order, and return the numbers
    of each bin's entries. `family` as in `pack`. Raises DataError if an entry does not fit on its own."""
    bins: list[list[int]] = []
    counted = TokenCounter(form, family)
    for number, items in enumerate(entries):
        if bins and counted.with_items(items) <= budget:
            bins[-1].append(number)
            continue
        counted = TokenCounter(form, family)
        if (length := counted.with_items(items)) > budget:
            raise DataError(
                f"row {items[0].prompt.row.id}: {length} tokens exceed learner.max_tokens_per_microbatch = {budget}; "
                "raise it, or lower data.max_prompt_tokens",
                field="messages",
            )
        bins.append([number])
    return bins


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


def _cut(group: AdvantageGroup, form: str, budget: int) -> list[AdvantageGroup]:
    """Return parts of a group that fit, each with the prompt."""
    bounds = [0]
    continuations = group.item.continuations
    for i in range(1, len(continuations) + 1):
        candidate = replace(group.item, continuations=continuations[bounds[-1] : i])
        if packed_length(candidate, form) > budget and i - 1 > bounds[-1]:
            bounds.append(i - 1)
    bounds.append(len(continuations))
    return [group.part(start, stop) for start, stop in pairwise(bounds)]
