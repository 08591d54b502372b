"""Prompts, continuations and scored groups made by hand, without a model."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from tests.tiny_models import make_row
from tiercel.models.prompts import completion_positions
from tiercel.packing.batch import AdvantageGroup, MicrobatchUnit, advantage_groups, units_of
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.packing.sharing import PictureFamily
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Group, ImagePlan, ScoredCompletion, ScoredGroup


class NineIsAPicture:
    """A family whose pictures are written as nines."""

    def is_placeholder(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids == 9

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        return [9] * plan.token_count


NINES = NineIsAPicture()


def picture(name: str, count: int = 1) -> EncodedImage:
    plan = ImagePlan(original_size=(8, 8), processed_size=(8, 8), grid=(1, 1, 1), token_count=count)
    return EncodedImage(sha256=name, plan=plan, views=())


def prompt(ids: Sequence[int], index: int = 0) -> EncodedPrompt:
    """A text-only prompt with plain positions; its row is `row-{index}`."""
    return EncodedPrompt(
        row=make_row(f"row-{index}", "Hello", 0),
        index=index,
        text="",
        token_ids_P=torch.tensor(ids),
        positions_DP=torch.arange(len(ids))[None],
        images=(),
    )


def continuation(of: EncodedPrompt, ids: Sequence[int], scored: Sequence[bool] | None = None) -> Continuation:
    return Continuation(
        token_ids_L=torch.tensor(ids),
        positions_DL=completion_positions(of.positions_DP, len(ids)),
        is_scored_L=torch.tensor(scored or [True] * len(ids)),
    )


def item(prompt_length: int, *lengths: int, index: int = 0) -> PackItem:
    """A prompt and completions of these lengths; the ids do not matter."""
    start = prompt(range(prompt_length), index)
    return PackItem(prompt=start, continuations=tuple(continuation(start, range(length)) for length in lengths))


def units_of_items(
    entries: Sequence[Sequence[PackItem]],
    form: str,
    budget: int,
    family: PictureFamily | None = None,
    may_run_prefix: bool = False,
) -> list[MicrobatchUnit]:
    """Microbatches of items that stay together; each has the numbers of its entries."""
    every = [each for of_entry in entries for each in of_entry]
    numbers = iter(range(sum(len(each.continuations) for each in every)))
    named = [
        (of_entry[0].prompt.row.id, [next(numbers) for each in of_entry for _ in each.continuations])
        for of_entry in entries
    ]

    def batch_of(packed, chosen):
        return SimpleNamespace(packed=packed, entries=chosen, prompt_ids=tuple(named[each][0] for each in chosen))

    return units_of(pack(every, family), named, form, budget, may_run_prefix, batch_of)


def bins(entries: Sequence[Sequence[PackItem]], form: str, budget: int, family=None) -> list[list[int]]:
    """The numbers of the entries in each microbatch."""
    return [list(each.entries) for unit in units_of_items(entries, form, budget, family) for each in unit.batches]


def sampled_items(groups: Sequence[Group]) -> list[PackItem]:
    """The completions of an engine, behind their prompts."""
    return [
        PackItem(
            prompt=group.prompt,
            continuations=tuple(continuation(group.prompt, each.token_ids_L.tolist()) for each in group.completions),
        )
        for group in groups
    ]


def scored_group(of: EncodedPrompt, completions: Sequence[tuple[Sequence[int], float | None]]) -> ScoredGroup:
    """Completions by their ids and totals. The logprobs that the engine reported count down from -1."""
    made = []
    for ids, total in completions:
        completion = Completion(
            token_ids_L=torch.tensor(ids),
            logprobs_L=-1.0 - torch.arange(len(ids)),
            text="",
            is_truncated=False,
            seed=0,
        )
        made.append(ScoredCompletion(completion=completion, rewards={}, total=total, is_correct=None))
    group = Group(prompt=of, completions=tuple(each.completion for each in made), policy_version=0)
    return ScoredGroup(group=group, completions=tuple(made))


def learnable_groups(scored: Sequence[ScoredGroup]) -> list[AdvantageGroup]:
    """With group-normalised advantages over the completions that have a total; equal ones get 0."""
    advantages: list[list[float | None]] = []
    for group in scored:
        totals = torch.tensor([each.total for each in group.completions if each.total is not None])
        spread = totals - totals.mean()
        normal = iter((spread / (totals.std() + 1e-4) if totals.std() > 0 else 0 * spread).tolist())
        advantages.append([None if each.total is None else next(normal) for each in group.completions])
    return advantage_groups(scored, advantages)
