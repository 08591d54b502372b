"""Shapes of a step, and its groups of random tokens."""

from dataclasses import dataclass

import torch

from benchmarks.random_groups import random_group, random_prompt
from tests.tiny_models import noise_image
from tiercel.models.policy import Policy
from tiercel.packing.batch import AdvantageGroup
from tiercel.types import EncodedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """P prompt tokens, of which an image has (side / 28) squared; C tokens for each of G completions; groups of a
    step."""

    side: int  # pixels; 0: no picture
    prompt_tokens: int
    completion_tokens: int
    group_size: int
    groups: int = 8

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all completions."""
        return self.rows * self.completion_tokens


SHAPES = {
    "large image": Shape(side=952, prompt_tokens=1180, completion_tokens=200, group_size=8),
    "text only": Shape(side=0, prompt_tokens=1180, completion_tokens=200, group_size=8),
    "short": Shape(side=448, prompt_tokens=280, completion_tokens=64, group_size=8),
    "long completion": Shape(side=448, prompt_tokens=280, completion_tokens=512, group_size=8),
}
TOY_SHAPES = {
    "picture": Shape(side=56, prompt_tokens=14, completion_tokens=12, group_size=3, groups=2),
    "text only": Shape(side=0, prompt_tokens=14, completion_tokens=12, group_size=3, groups=2),
}


def make_prompts(policy: Policy, shape: Shape) -> list[EncodedPrompt]:
    """Return prompts of random tokens, each with its own picture."""
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for index in range(shape.groups):
        image = policy.family.encode_image(noise_image(shape.side, shape.side, seed=index)) if shape.side else None
        prompts.append(random_prompt(policy.family, shape.prompt_tokens, index, generator, image))
    return prompts


def make_groups(policy: Policy, shape: Shape) -> list[AdvantageGroup]:
    """Return groups of random tokens with normally distributed advantages."""
    generator = torch.Generator().manual_seed(1)
    return [
        random_group(policy.family, prompt, shape.completion_tokens, shape.group_size, generator)
        for prompt in make_prompts(policy, shape)
    ]
