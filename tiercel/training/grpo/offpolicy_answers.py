"""Answers of rows in place of completions: what a student learns off policy."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tiercel.config.schema import DistillRecipe, GrpoRecipe
from tiercel.data.encoding import taught_prompt_encoder
from tiercel.data.turns import only_last_turn
from tiercel.errors import DataError
from tiercel.models.families.base import Family
from tiercel.models.prompts import encode_conversation
from tiercel.rollout.trajectory import given_completion
from tiercel.training.distillation.teacher_term import Encode
from tiercel.types import Completion, EncodedPrompt, Group, Row


def learnt_prompt_encoder(family: Family, recipe: GrpoRecipe, for_teacher: Encode | None) -> Encode:
    """Make a function that encodes a row as a prompt to learn from. It raises DataError, so that the row is rejected,
    if the row's answer replaces a completion and is too long, or if `for_teacher`, which encodes the prompt of a
    teacher that has its own, cannot take the row."""
    encode = taught_prompt_encoder(family, recipe)
    if for_teacher is not None:
        encode = partial(_if_teachable, encode, for_teacher)
    if not isinstance(recipe, DistillRecipe) or not recipe.teacher.rows_share:
        return encode
    return partial(_with_answer, encode, family, recipe)


def _if_teachable(encode: Encode, for_teacher: Encode, row: Row, index: int) -> EncodedPrompt:
    for_teacher(row, index)
    return encode(row, index)


def _with_answer(encode: Encode, family: Family, recipe: DistillRecipe, row: Row, index: int) -> EncodedPrompt:
    prompt = encode(row, index)
    if _is_answered(recipe, index):
        _answer(recipe, family, prompt)
    return prompt


def answered_groups(
    recipe: GrpoRecipe, family: Family, prompts: Sequence[EncodedPrompt], policy_version: int
) -> list[Group]:
    """Make groups whose completions are all the row's answer, for the recipe's share of the prompts. The answer stands
    there as often as others have completions, so that the share is that of the loss too. The seed and the prompt's
    index decide which ones. Raises DataError if such a row has no answer."""
    if not isinstance(recipe, DistillRecipe):
        return []
    count = recipe.rollout.group_size
    return [
        Group(
            prompt=prompt,
            completions=(_answer(recipe, family, prompt),) * count,
            policy_version=policy_version,
            is_of_row=True,
        )
        for prompt in prompts
        if _is_answered(recipe, prompt.index)
    ]


def _is_answered(recipe: DistillRecipe, index: int) -> bool:
    return random.Random(f"{recipe.train.seed}:{index}").random() < recipe.teacher.rows_share


def _answer(recipe: DistillRecipe, family: Family, prompt: EncodedPrompt) -> Completion:
    row, data = prompt.row, recipe.data
    most = data.max_prompt_tokens + recipe.rollout.max_new_tokens
    asked = replace(row, messages=only_last_turn(row.messages))  # earlier answers are in the prompt
    found = encode_conversation(family, asked, prompt.index, prompt.images, system=data.system, max_prompt_tokens=most)
    token_ids_L = found.token_ids_L[found.is_scored_L]
    if len(token_ids_L) > recipe.rollout.max_new_tokens:
        raise DataError(
            f"its answer has {len(token_ids_L)} tokens, more than rollout.max_new_tokens "
            f"{recipe.rollout.max_new_tokens}; raise it",
            field="messages",
        )
    return given_completion(family, token_ids_L)
