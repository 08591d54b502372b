"""A teacher of the policy: what it says about the completions before an update, and its term of the loss.

N scored tokens of a microbatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tiercel.algorithms.kl import k2
from tiercel.algorithms.teacher import DIVERGENCES, Teacher
from tiercel.config.schema import Data
from tiercel.data.encoding import prompt_encoder
from tiercel.data.marks import fill_prompt
from tiercel.devices import moved
from tiercel.distributed.ranks import Ranks
from tiercel.errors import DataError, ModelError
from tiercel.models.families.base import Family
from tiercel.models.prompts import completion_positions
from tiercel.packing.batch import AdvantageGroup, PolicyBatch, in_completion_order
from tiercel.packing.divergence import Target, TeacherTokens
from tiercel.packing.layout import PackItem
from tiercel.packing.logprobs import TokenScores
from tiercel.reliability.redaction import without_secrets
from tiercel.training.distillation.served_teacher import ServedTeacher
from tiercel.training.policy_passes import NO_TOTALS, PolicyPasses
from tiercel.types import Completion, EncodedPrompt, Row, ScoredGroup

Encode = Callable[[Row, int], EncodedPrompt]
UTF8_BYTES = 4  # per character, at most
# What decides pixels, tokens and positions, in a config or that of its tower, whatever the tower's width and depth.
SIZES_OF_TOKENS = (
    *("image_seq_length", "mm_tokens_per_image", "image_size", "patch_size", "hidden_stride"),
    *("image_grid_pinpoints", "vision_aspect_ratio"),
    *("spatial_patch_size", "temporal_patch_size", "spatial_merge_size", "tokens_per_second"),
)
TOP_TOKENS = 256  # tokens whose whole distribution exists at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherTerm:
    """What a teacher adds at the scored tokens of a microbatch."""

    values_N: Tensor  # with gradient, times the coef
    kl_sum: Tensor  # of the divergence over the tokens, for the metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTeacher:
    """A teacher that is whole on every rank."""

    section: Teacher
    passes: PolicyPasses
    words: int  # of the policy's vocabulary or of its own, whichever is smaller: they may be padded differently

    def distribution(self, states_MH: Tensor) -> Tensor:
        """Compute the logprobs (M, V) of all words."""
        return self.passes.learner.head.distribution(states_MH, self.passes.temperature)

    def tokens(self, groups: Sequence[AdvantageGroup]) -> list[TeacherTokens]:
        """Compute what the teacher says, each prompt once for all its completions."""
        passes = self.passes
        found: list[TeacherTokens] = []
        units = passes.units(groups, NO_TOTALS)
        for unit in units:
            for batch, states_NH in zip(unit.batches, passes.states(unit), strict=True):
                tokens = self._told(states_NH, batch.packed.targets_N).moved(torch.device("cpu"))
                lengths = batch.packed.scored_lengths
                ends = list(accumulate(lengths))
                found += [tokens[end - size : end] for size, end in zip(lengths, ends, strict=True)]
        passes.vision.end_step()
        return in_completion_order(units, found)

    @torch.no_grad()
    def _told(self, states_NH: Tensor, targets_N: Tensor) -> TeacherTokens:
        top_k, head = self.section.top_k, self.passes.learner.head
        targets_N = targets_N.to(states_NH.device)
        if top_k is None:
            drawn_N = head(states_NH, targets_N, self.passes.temperature).logprobs_N
            return TeacherTokens(drawn_N=drawn_N, states_NH=None if self.section.divergence == "token" else states_NH)
        parts = []
        for states_MH, targets_M in zip(states_NH.split(TOP_TOKENS), targets_N.split(TOP_TOKENS), strict=True):
            logprobs_MV = self.distribution(states_MH)[:, : self.words]
            values_MK, words_MK = logprobs_MV.topk(min(top_k, self.words))  # top_k may exceed the number of words
            drawn_M = logprobs_MV.gather(1, targets_M[:, None])[:, 0]
            parts.append(TeacherTokens(drawn_N=drawn_M, words_NK=words_MK, logprobs_NK=values_MK))
        return TeacherTokens.joined(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Teaching:
    """A frozen teacher of the policy."""

    section: Teacher
    told_by: LocalTeacher | ServedTeacher
    encode: Encode | None  # of the teacher's own prompts; None: it is asked exactly what the policy is
    ranks: Ranks

    def with_teacher_terms(self, groups: Sequence[AdvantageGroup]) -> list[AdvantageGroup]:
        """Add what the teacher says about every completion. Raises DataError for a prompt that it cannot take."""
        asked = self.ranks.run_on_all(lambda: [self._asked(group) for group in groups])
        parts = iter(self.told_by.tokens(asked))
        return [replace(group, teacher=tuple(next(parts) for _ in group.sampler_logprobs)) for group in groups]

    def target(self, batch: PolicyBatch) -> Target | None:
        """Return what the head computes a divergence from; None if the drawn tokens' logprobs are enough."""
        measure = DIVERGENCES[self.section.divergence].of
        if measure is None or batch.teacher is None:
            return None
        mix = self.section.mix
        return Target(
            tokens=batch.teacher,
            distribution=self.told_by.distribution,
            measure=lambda policy_MV, teacher_MV: measure(policy_MV, teacher_MV, mix),
            is_by_row=self.section.prompt is not None,
        )

    def term(self, batch: PolicyBatch, scores: TokenScores) -> TeacherTerm | None:
        """Compute what the teacher adds to the loss at each token; None for an empty microbatch."""
        if batch.teacher is None:
            return None
        values_N = scores.divergence_N
        if values_N is None:
            teacher_N = moved(batch.teacher.drawn_N, scores.logprobs_N.device)
            kl_sum = (scores.logprobs_N.detach() - teacher_N).sum()
            return TeacherTerm(values_N=self.section.coef * k2(scores.logprobs_N, teacher_N), kl_sum=kl_sum)
        return TeacherTerm(values_N=self.section.coef * values_N, kl_sum=values_N.detach().sum())

    def _asked(self, group: AdvantageGroup) -> AdvantageGroup:
        """Put the teacher's own prompt before the completions, if it has one."""
        if self.encode is None:
            return group
        item = group.item
        prompt = self.encode(item.prompt.row, item.prompt.index)
        if any(each.images for each in item.continuations):
            raise DataError(
                ("a teacher with a prompt of its own does not accept pictures returned by tools"), field="images"
            )
        continuations = [
            replace(each, positions_DL=completion_positions(prompt.positions_DP, len(each.token_ids_L)))
            for each in item.continuations
        ]
        return replace(group, item=PackItem(prompt=prompt, continuations=tuple(continuations)))


def with_gaps(
    family: Family,
    scored: Sequence[ScoredGroup],
    advantages: Sequence[Sequence[float | None]],
    taught: Sequence[AdvantageGroup],
) -> list[ScoredGroup]:
    """Note with each completion by how much the policy finds its tokens likelier than the teacher does, if there is a
    teacher. `taught` has the completions with an advantage."""
    told = {group.item.prompt.index: iter(group.teacher or ()) for group in taught}
    noted = []
    for group, values in zip(scored, advantages, strict=True):
        parts = told.get(group.group.prompt.index, iter(()))
        tokens = [None if value is None else next(parts, None) for value in values]
        completions = [
            each if said is None else replace(each, teacher_gaps=_gaps(family, each.completion, said.drawn_N))
            for each, said in zip(group.completions, tokens, strict=True)
        ]
        noted.append(replace(group, completions=tuple(completions)))
    return noted


def _gaps(family: Family, completion: Completion, drawn_N: Tensor) -> tuple[tuple[str, float], ...]:
    pieces = without_secrets(token_texts(family, completion.token_ids_L[completion.is_sampled_L].tolist()))
    return tuple(zip(pieces, (completion.sampled_logprobs - drawn_N).tolist(), strict=True))


def token_texts(family: Family, token_ids: Sequence[int]) -> list[str]:
    """Decode tokens one by one. If several tokens make up one character, the last of them has its text."""
    texts: list[str] = []
    begun: list[int] = []
    for number, token_id in enumerate(token_ids, start=1):
        begun.append(token_id)
        text = family.tokenizer.decode(begun)
        goes_on = text.endswith("\N{REPLACEMENT CHARACTER}") and len(begun) < UTF8_BYTES and number < len(token_ids)
        texts.append("" if goes_on else text)
        begun = begun if goes_on else []
    return texts


def require_same_vocabulary(teacher: Family, policy: Family) -> None:
    """Raise ModelError if two checkpoints do not have the same tokenizer."""
    words, others = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if words != others:
        different = sorted(word for word in words.keys() | others.keys() if words.get(word) != others.get(word))
        raise ModelError(
            f"{teacher.checkpoint.path}: the teacher's tokenizer differs from the one of {policy.checkpoint.path}; "
            f"{len(different)} words have different ids, such as {', '.join(map(repr, different[:3]))}; use a "
            "teacher with the same tokenizer"
        )
    if unlike := set(teacher.placeholder_ids) ^ set(policy.placeholder_ids):
        raise ModelError(
            f"{teacher.checkpoint.path}: the teacher and {policy.checkpoint.path} do not reserve the same words for "
            f"pictures; one of them may write {', '.join(teacher.tokenizer.convert_ids_to_tokens(sorted(unlike)))}; "
            "use a teacher that sees pictures as the policy does"
        )


def teacher_encoder(section: Teacher, data: Data, teacher: Family, policy: Family) -> Encode | None:
    """Make a function that encodes the teacher's own prompts; None if they are the policy's."""
    if section.prompt is None and _sees_the_same(teacher, policy):
        return None
    encode = prompt_encoder(teacher, data)
    if section.prompt is None:
        return encode
    return partial(_encode_otherwise, encode, section.prompt)


def _encode_otherwise(encode: Encode, template: str, row: Row, index: int) -> EncodedPrompt:
    messages = fill_prompt(row.messages, template, {**row.columns, "answer": row.answer}, "the teacher's prompt")
    return encode(replace(row, messages=messages), index)


def _sees_the_same(teacher: Family, policy: Family) -> bool:
    """Return whether both make the same pixels and tokens from a row."""
    one, other = teacher.checkpoint, policy.checkpoint
    return (
        teacher.architecture == policy.architecture
        and one.chat_template == other.chat_template
        and _seen_by(teacher) == _seen_by(policy)
        and (teacher.min_pixels, teacher.max_pixels) == (policy.min_pixels, policy.max_pixels)
    )


def _seen_by(family: Family) -> list[Any]:
    """Return what decides how a family sees a picture, besides its kind. For a model without a family of its own, it
    is the whole config of its tower."""
    checkpoint = family.checkpoint
    processor = None if checkpoint.image_processor is None else checkpoint.image_processor.to_dict()
    tower = getattr(checkpoint.config, "vision_config", None)
    if family.needs_proof:
        return [processor, None if tower is None else tower.to_dict()]
    sizes = [getattr(config, name, None) for config in (checkpoint.config, tower) for name in SIZES_OF_TOKENS]
    return [processor, sizes]
