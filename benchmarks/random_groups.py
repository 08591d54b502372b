"""Prompts and completions of random tokens in given lengths.

Shape suffixes: P prompt tokens, C completion tokens, G completions of a group.
"""

import torch

from tiercel.models.families.base import Family
from tiercel.models.prompts import completion_positions
from tiercel.packing.batch import AdvantageGroup
from tiercel.packing.layout import Continuation, PackItem
from tiercel.types import EncodedImage, EncodedPrompt, Message, Row


def random_prompt(
    family: Family, length: int, index: int, generator: torch.Generator, image: EncodedImage | None = None
) -> EncodedPrompt:
    """Return a prompt of `length` tokens in total, including the image's, which come first after one token of text.
    Raises ValueError if the image leaves no room."""
    images = () if image is None else (image,)
    vision = [token for picture in images for token in family.image_token_ids(picture.plan)]
    if length < len(vision) + 2:
        raise ValueError(f"an image of {len(vision)} tokens needs a prompt of {len(vision) + 2} or more, not {length}")
    text_P = torch.randint(min(family.placeholder_ids), (length - len(vision),), generator=generator)
    token_ids_P = torch.cat([text_P[:1], torch.tensor(vision, dtype=torch.int64), text_P[1:]])
    return EncodedPrompt(
        row=Row(
            id=f"random:{index}",
            messages=(Message(role="user", content=""),),
            images=(),
            columns={},
            file="random",
            line=index + 1,
        ),
        index=index,
        text="",
        token_ids_P=token_ids_P,
        positions_DP=family.positions(token_ids_P, [picture.plan for picture in images]),
        images=images,
    )


def random_group(
    family: Family, prompt: EncodedPrompt, completion_tokens: int, group_size: int, generator: torch.Generator
) -> AdvantageGroup:
    """Return completions of one length with normally distributed advantages."""
    continuations = tuple(
        Continuation(
            token_ids_L=torch.randint(min(family.placeholder_ids), (completion_tokens,), generator=generator),
            positions_DL=completion_positions(prompt.positions_DP, completion_tokens),
            is_scored_L=torch.ones(completion_tokens, dtype=torch.bool),
        )
        for _ in range(group_size)
    )
    return AdvantageGroup(
        item=PackItem(prompt=prompt, continuations=continuations),
        numbers=tuple(range(group_size)),
        advantages_G=torch.randn(group_size, generator=generator),
        sampler_logprobs=tuple(torch.zeros(completion_tokens) for _ in range(group_size)),
    )
