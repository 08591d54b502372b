"""Random rows that begin alike: questions of the same pictures, and answers that fork."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tests.tiny_models import random_ids, tiny_prompts
from tiercel.models.families.base import Family
from tiercel.models.prompts import completion_positions
from tiercel.packing import sharing
from tiercel.packing.layout import Continuation, PackItem
from tiercel.types import EncodedPrompt


def tree_rows(family: Family, seed: int) -> tuple[PackItem, ...]:
    """Make rows whose prompts show nothing, a picture or two pictures, and then ask something. Questions and answers
    are made of few words, so that some begin alike: a tree of up to five levels, whose nodes may have one token."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    words = [random_ids(family, 4, generator) for _ in range(3)]
    items = []
    for index, start in enumerate([*tiny_prompts(family), *dice.choices(tiny_prompts(family), k=4)]):
        asked = [*dice.choices(words, k=dice.randint(0, 2)), random_ids(family, dice.randint(0, 2), generator)]
        answers = [
            torch.cat([*dice.choices(words, k=dice.randint(0, 3)), random_ids(family, 1, generator)])
            for _ in range(dice.randint(1, 4))
        ]
        items.append(row_of(start, index, torch.cat(asked), answers))
    return tuple(items)


def row_of(start: EncodedPrompt, index: int, asked_L: Tensor, answers: Sequence[Tensor]) -> PackItem:
    """Make a row: a prompt that asks something more, and its answers, all of whose tokens are scored."""
    positions_DL = completion_positions(start.positions_DP, len(asked_L))
    prompt = replace(
        start,
        index=index,
        token_ids_P=torch.cat([start.token_ids_P, asked_L]),
        positions_DP=torch.cat([start.positions_DP, positions_DL], dim=1),
    )
    continuations = tuple(
        Continuation(
            token_ids_L=ids_L,
            positions_DL=completion_positions(prompt.positions_DP, len(ids_L)),
            is_scored_L=torch.ones(len(ids_L), dtype=torch.bool),
        )
        for ids_L in answers
    )
    return PackItem(prompt=prompt, continuations=continuations)


@contextmanager
def short_pieces_shared(shortest: int = 2) -> Iterator[None]:
    """Share pieces of few tokens, which would not pay, so that small trees have many nodes."""
    before, sharing.SHORTEST = sharing.SHORTEST, shortest
    try:
        yield
    finally:
        sharing.SHORTEST = before
