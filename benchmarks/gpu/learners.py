"""Two learners: tiercel's, and the plain one that repeats the prompt for every completion.

Both leave the LoRA gradient of the same loss, - sum over tokens of advantage times logprob / number of tokens. Shape
suffixes: C completion tokens, R rows of a microbatch, L their length (prompt and completion), D position dimensions, N
scored tokens of a microbatch, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from benchmarks.flops import (
    DecoderShape,
    Flops,
    decoder_update,
    group_pairs,
    head_update,
    repeated_pairs,
    vision_forward,
)
from benchmarks.gpu.running import NotHere
from tiercel.config.schema import SftRecipe
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.prefix import passes
from tiercel.packing.batch import AdvantageGroup, policy_units, totals_of
from tiercel.packing.layout import Continuation
from tiercel.training.policy_passes import new_learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Pixels:
    """A picture as transformers' forward pass takes it, made in advance."""

    values: Tensor
    grid: Tensor


def recipe_with(settings: Mapping[str, Any]) -> SftRecipe:
    """Return a recipe with these keys of `learner`. Raises NotHere if this version has no such key or value."""
    data = {"train": ".", "max_prompt_tokens": 1}  # allows a microbatch of any size
    tree = {"model": {"path": "."}, "data": data, "train": {"steps": 1}, "output": ".", "learner": settings}
    try:
        return SftRecipe.model_validate(tree)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise NotHere(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


class SharedLearner:
    """tiercel's learner: each picture once, each prompt once, no logits."""

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[AdvantageGroup],
        settings: Mapping[str, Any],
        vision: VisionStore | None = None,
    ):
        recipe = recipe_with(settings)
        self.policy = policy
        self.groups = groups
        self.budget = recipe.learner.max_tokens_per_microbatch
        self.learner = new_learner(policy, recipe, policy.device)[0]
        self.vision = vision  # None: each update computes the features again

    def update(self) -> None:
        """Run forward and backward over all groups, including vision features."""
        policy, learner = self.policy, self.learner
        totals = totals_of(self.groups)
        vision = VisionStore(policy, cache_bytes=0) if self.vision is None else self.vision
        learner.train()
        for unit in policy_units(self.groups, totals, learner.form, self.budget, may_run_prefix=True):
            for batch, features_KH, prefix in passes(unit, learner.run_prefix, vision.features):
                logprobs_N = learner(batch.packed, features_KH, 1.0, prefix).logprobs_N
                advantages_N = batch.advantages_C[batch.packed.continuation_of_N].to(policy.device)
                (-(logprobs_N * advantages_N).sum() / totals.tokens).backward()

    def flops(self, shape: DecoderShape, is_checkpointed: bool) -> Flops:
        """Return the operations that an update executes. A group that is cut between microbatches counts as one that is
        not."""
        return reduce(add, (self._group_flops(group, shape, is_checkpointed) for group in self.groups))

    def _group_flops(self, group: AdvantageGroup, shape: DecoderShape, is_checkpointed: bool) -> Flops:
        lengths = _completion_lengths(group)
        pairs = group_pairs(len(group.item.prompt.token_ids_P), lengths)
        decoder = decoder_update(shape, group.item.shared_length, pairs, is_checkpointed=is_checkpointed)
        return decoder + head_update(shape, sum(lengths)) + _vision_flops(self.policy, group)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainRow:
    """A prompt with one of its completions."""

    group: AdvantageGroup
    continuation: Continuation
    advantage: float
    pixels: Pixels | None  # None: the prompt has no picture

    @property
    def token_ids_L(self) -> Tensor:
        return torch.cat([self.group.item.prompt.token_ids_P, self.continuation.token_ids_L])

    @property
    def positions_DL(self) -> Tensor:
        return torch.cat([self.group.item.prompt.positions_DP, self.continuation.positions_DL], dim=1)


class PlainLearner:
    """transformers' own forward pass on rows of prompt and completion, logits of the completions, log-softmax.

    All rows have one length, so that none is padded. Raises ValueError if they have not.
    """

    def __init__(self, policy: Policy, groups: Sequence[AdvantageGroup], budget: int):
        self.policy = policy
        self.groups = groups
        self.rows = list(_plain_rows(policy, groups))
        shapes = {(len(row.token_ids_L), len(row.continuation.token_ids_L)) for row in self.rows}
        if len(shapes) > 1:
            raise ValueError(f"the plain learner takes rows of one length, not of {sorted(shapes)}")
        length, self.completion_tokens = shapes.pop()
        self.rows_at_a_time = max(1, budget // length)

    def update(self) -> None:
        """Run forward and backward over all groups, with as many rows at a time as the budget of tokens allows."""
        self.policy.model.train()
        tokens = totals_of(self.groups).tokens
        for start in range(0, len(self.rows), self.rows_at_a_time):
            (-self._objective(self.rows[start : start + self.rows_at_a_time]) / tokens).backward()

    def _objective(self, rows: Sequence[PlainRow]) -> Tensor:
        """Return the sum of advantage times logprob."""
        device, completion_tokens = self.policy.device, self.completion_tokens
        ids_RL = torch.stack([row.token_ids_L for row in rows]).to(device)
        first = ids_RL.shape[1] - completion_tokens - 1  # the place that predicts a completion's first token
        with self.policy.autocast():
            logits_RCV = self.policy.model(
                input_ids=ids_RL,
                position_ids=torch.stack([row.positions_DL for row in rows], dim=1).to(device),
                **_pictures([row.pixels for row in rows if row.pixels is not None]),
                logits_to_keep=torch.arange(first, first + completion_tokens, device=device),
                use_cache=False,
            ).logits
        excluded = torch.tensor(self.policy.family.placeholder_ids, device=device)
        logprobs_RCV = logits_RCV.float().index_fill(-1, excluded, -torch.inf).log_softmax(-1)
        logprobs_RC = logprobs_RCV.gather(-1, ids_RL[:, first + 1 :, None])[..., 0]
        advantages_R = torch.tensor([row.advantage for row in rows], device=device)
        return (logprobs_RC * advantages_R[:, None]).sum()

    def flops(self, shape: DecoderShape, is_checkpointed: bool) -> Flops:
        """Return the operations that an update executes."""
        return reduce(add, (self._group_flops(group, shape, is_checkpointed) for group in self.groups))

    def _group_flops(self, group: AdvantageGroup, shape: DecoderShape, is_checkpointed: bool) -> Flops:
        lengths = _completion_lengths(group)
        pairs = repeated_pairs(len(group.item.prompt.token_ids_P), lengths)
        total = decoder_update(shape, group.item.repeated_length, pairs, is_checkpointed=is_checkpointed)
        total += head_update(shape, sum(lengths))
        for _ in lengths:
            total += _vision_flops(self.policy, group)
        return total


def set_checkpointing(policy: Policy, is_on: bool) -> None:
    """Set activation checkpointing of every layer, in training mode, for whichever learner runs next. Switching it on
    makes transformers request the gradient of all embeddings, including pictures' patches, and so a backward pass
    through the frozen vision tower. That is unnecessary without reentrant checkpoints, so the plain learner is spared
    it."""
    if is_on:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        policy.model.gradient_checkpointing_disable()
    policy.model.disable_input_require_grads()


def _completion_lengths(group: AdvantageGroup) -> list[int]:
    return [len(continuation.token_ids_L) for continuation in group.item.continuations]


def _vision_flops(policy: Policy, group: AdvantageGroup) -> Flops:
    config = policy.family.checkpoint.config.vision_config
    total = Flops()
    for image in group.item.prompt.images:
        total += vision_forward(config, image.plan.grid)
    return total


def _plain_rows(policy: Policy, groups: Sequence[AdvantageGroup]) -> Iterator[PlainRow]:
    for group in groups:
        pixels = _pixels(policy, group)
        for continuation, advantage in zip(group.item.continuations, group.advantages_G.tolist(), strict=True):
            yield PlainRow(group=group, continuation=continuation, advantage=advantage, pixels=pixels)


def _pictures(pixels: Sequence[Pixels]) -> dict[str, Tensor]:
    if not pixels:
        return {}
    return {
        "pixel_values": torch.cat([each.values for each in pixels]),
        "image_grid_thw": torch.cat([each.grid for each in pixels]),
    }


def _pixels(policy: Policy, group: AdvantageGroup) -> Pixels | None:
    if not group.item.prompt.images:
        return None
    pictures = [image.views[0].permute(2, 0, 1) for image in group.item.prompt.images]
    made = policy.family.checkpoint.image_processor(images=pictures, do_resize=False, return_tensors="pt")
    return Pixels(
        values=made["pixel_values"].to(policy.device, policy.compute_dtype),
        grid=made["image_grid_thw"].to(policy.device),
    )
