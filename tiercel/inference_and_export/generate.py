"""Completions of prompts by a model that was loaded for inference, with the prompt of training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any

from tiercel.config import Recipe
from tiercel.config.schema import GrpoRecipe, Rollout
from tiercel.data.encoding import row_images
from tiercel.data.marks import IMAGE_MARK, fill_prompt, place_marks
from tiercel.data.turns import read_messages
from tiercel.devices import training_device
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.models.families.base import ENVIRONMENT_COLUMN
from tiercel.models.policy import Policy, load_for_inference
from tiercel.models.prompts import encode_prompt
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward_equivalence_check import prove_where_needed
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import greedy_params, sampling_params
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.training.grpo.completion_sampling import CompletionSampler, open_dialogues
from tiercel.types import Completion, ImageRoots, ImageSource, Message, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """A model that completes prompts as the run did, with its system message, data.prompt, template, tools and pixel
    limits."""

    recipe: Recipe
    policy: Policy
    sampler: LocalSampler

    def complete(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageSource],
        *,
        count: int = 1,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        environment: str | None = None,
    ) -> tuple[Completion, ...]:
        """Complete one prompt `count` times, or once and greedily at temperature 0. Without an `<image>` mark, the
        images come first. `max_new_tokens` is by default the recipe's; `environment` is one of several by its name.
        Raises DataError if the marks are not as many as the images, or if the prompt or a picture cannot be encoded."""
        recipe, family = self.recipe, self.policy.family
        own = recipe.rollout if isinstance(recipe, GrpoRecipe) else Rollout()
        asked = Rollout(group_size=max(2, count), max_new_tokens=max_new_tokens or own.max_new_tokens, stop=own.stop)
        params = greedy_params(asked)
        if temperature > 0:
            params = replace(sampling_params(asked), group_size=count, temperature=temperature)
        folders = tuple(str(Path(each.path).parent) for each in images if each.path is not None)
        row = Row(
            id="prompt",
            messages=place_marks(self._as_in_training(tuple(messages)), IMAGE_MARK, len(images), "prompt", {}),
            images=tuple(images),
            columns={} if environment is None else {ENVIRONMENT_COLUMN: environment},
            file="a prompt",
            line=1,
            image_roots=ImageRoots(more=folders),
        )
        encoded = row_images(family, recipe.data, row)
        limit = recipe.data.max_prompt_tokens
        with open_dialogues(recipe, family) as dialogues:  # which gives the family its tools
            if environment is not None and not family.tools_by_environment:
                raise DataError(f"environment: is {environment}, but the recipe has no environments by name")
            request = encode_prompt(family, row, 0, encoded, system=recipe.data.system, max_prompt_tokens=limit)
            completion_sampler = CompletionSampler(sampler=self.sampler, dialogues=dialogues)
            (group,) = completion_sampler.sample(completion_sampler.begun([request]), params, [sampling_seed(seed, 0)])
        return group.completions

    def _as_in_training(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Put data.prompt around the last user turn, unless it takes columns of rows."""
        if (template := self.recipe.data.prompt) is None:
            return messages
        if names := {name for _, name, *_ in Formatter().parse(template) if name} - {"prompt"}:
            taken = ", ".join(sorted(names))
            logger.warning(f"data.prompt takes columns of rows ({taken}), so it is not put around this prompt")
            return messages
        return fill_prompt(messages, template, {})


def load_generator(recipe: Recipe, adapter: Path | None) -> Generator:
    """Load the recipe's model with an adapter, and prove that it computes the same as transformers if its family needs
    that."""
    policy = load_for_inference(recipe, training_device(), adapter)
    prove_where_needed(policy)
    rollout = recipe.rollout if isinstance(recipe, GrpoRecipe) else Rollout()
    sampler = LocalSampler(policy, VisionStore(policy, 0), prepacked_bytes=rollout.prepacked_bytes)
    return Generator(recipe=recipe, policy=policy, sampler=sampler)


def as_turns(prompt: str | Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return a text, or turns as rows have them, as turns. Raises DataError if a turn cannot be read, or if none is the
    user's."""
    if isinstance(prompt, str):  # whatever it looks like
        turns: tuple[Message, ...] = (Message(role="user", content=prompt),)
    else:
        turns = read_messages(list(prompt), "prompt")
    if not any(turn.role == "user" for turn in turns):
        raise DataError("there is no user turn to answer", field="prompt")
    if turns[-1].role != "user":
        logger.warning("the turns after the last user turn are left out, because the model answers that one")
    return turns


def in_words(completion: Completion) -> str:
    """Return a completion as text, turn by turn if there are several."""
    if completion.trajectory is None:
        return completion.text
    lines = []
    for turn in completion.trajectory.turns:
        lines += [turn.text] if turn.answer is None else [turn.text, f"[came back] {turn.answer}"]
    return "\n".join(lines)
