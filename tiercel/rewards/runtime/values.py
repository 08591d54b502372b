"""Compute the reward `model` by a reward model of `tiercel reward`: the value that it gives a row's prompt, with its
pictures, and a completion.

Completions of one prompt share its computation, as in the learner. Imports torch and transformers, as model.py does.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tiercel.algorithms import completions
from tiercel.config.schema import Model
from tiercel.data.media.images import decode
from tiercel.errors import DataError, ModelError, TrainingError
from tiercel.message_text import first_line
from tiercel.models.families.base import Family
from tiercel.models.families.loading import load_family
from tiercel.models.layers.rotary import require_steady_positions
from tiercel.models.layers.value_head import NAME
from tiercel.models.policy import WHOLE_FILE, frozen_policy
from tiercel.models.prompts import encode_conversation, prompt_messages
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.checkpoint_files import read_tensors
from tiercel.models.weights.loading import DTYPES
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.packing.examples import example_groups, example_units
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.forward_equivalence_check import prove_where_needed
from tiercel.packing.pass_options import chosen_form
from tiercel.rewards.external import RewardModel
from tiercel.types import EncodedImage, EncodedPrompt, Example, Message, VideoSource


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrompt:
    """A completion's text, and the prompt that it answers."""

    text: str
    prompt: EncodedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueModel:
    """A frozen reward model with a value head."""

    options: RewardModel
    learner: PackedPolicy
    vision: VisionStore

    def scores(self, answers: Sequence[AnsweredPrompt]) -> list[float | DataError]:
        """Compute the value of each answer; for an answer that cannot be encoded, return the error in its place."""
        found: list[float | DataError] = []
        examples: list[Example] = []
        images: dict[Hashable, tuple[EncodedImage, ...]] = {}  # decoded once for all answers
        for answer in answers:
            row = answer.prompt.row
            # The key is not the row's id, because two files may use the same id.
            shown = row.visuals[: len(answer.prompt.images)], row.image_roots, row.pixels
            try:
                if shown not in images:
                    images[shown] = self._images(answer.prompt)
                examples.append(self._example(answer, images[shown], len(found)))
                found.append(0.0)
            except DataError as error:
                found.append(error)
        for place, value in self._values(examples).items():
            found[place] = value
        self.vision.end_step()
        return found

    @property
    def _family(self) -> Family:
        return self.vision.policy.family

    def _images(self, prompt: EncodedPrompt) -> tuple[EncodedImage, ...]:
        """Decode the pictures of the prompt's row. Raises DataError for a video."""
        row = prompt.row
        found = []
        for source, image in zip(row.visuals, prompt.images, strict=False):  # others are of later turns
            if isinstance(source, VideoSource):
                raise DataError("a reward model of `tiercel reward` does not accept videos as a reward", field="videos")
            width, height = image.plan.original_size
            found.append(self._family.encode_image(decode(source, row.image_roots, width * height), row.pixels))
        return tuple(found)

    def _example(self, answer: AnsweredPrompt, images: Sequence[EncodedImage], index: int) -> Example:
        """Encode the turns before the answer, with the system message that the policy saw, and the answer."""
        row, first = answer.prompt.row, answer.prompt.messages[0]
        turns = prompt_messages(row.messages)
        if row.boxes and "<bbox>" in answer.text:
            raise DataError("the completion contains <bbox>, which is a mark for rows", field="messages")
        boxes = sum(message.content.count("<bbox>") for message in turns)
        answered = replace(
            row,
            messages=(*turns, Message(role="assistant", content=answer.text)),
            boxes=row.boxes[:boxes],
            box_images=row.box_images[:boxes],
        )
        conversation = encode_conversation(
            self._family,
            answered,
            index,
            images,
            system=first.content if first.role == "system" else None,
            max_prompt_tokens=self.options.max_tokens,
        )
        return Example(conversations=(conversation,))

    @torch.no_grad()
    def _values(self, examples: Sequence[Example]) -> dict[int, float]:
        """Compute the values, by the examples' indices."""
        form, budget = self.learner.form, self.options.batch_tokens
        found: dict[int, float] = {}
        made = example_groups(examples, self._family)
        for unit in example_units(made, form, budget, False, self._family):
            (each,) = unit.batches
            packed = each.packed
            try:
                values_N = self.learner(packed, self.vision.features(packed.images), 1.0).values_N
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise TrainingError(
                    f"reward model at {self.options.path}: out of memory: {first_line(error)}\nlower its "
                    f"model.batch_tokens (now {budget})"
                ) from error
            indices = [example.prompt.index for example in each.examples]
            values = completions.lasts(values_N, packed.continuation_of_N).tolist()
            found |= dict(zip(indices, values, strict=True))
        return found


def is_value_model(options: RewardModel, path: Path) -> bool:
    """Return whether a recipe's reward model was made by `tiercel reward`, judging by its files. `path` is the
    checkpoint's directory."""
    return options.adapter is not None or (path / WHOLE_FILE).is_file()


def load_value_model(options: RewardModel, path: Path) -> ValueModel:
    """Load a reward model of `tiercel reward` from its directory, or from the directory of its base and
    `options.adapter`. Raises ModelError."""
    if options.label:
        raise ModelError(f"model.label: is {options.label}, but {path} returns 1 score, counted from 0")
    on_gpu = options.device == "auto" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    model = Model(path=str(path), min_pixels=options.min_pixels, max_pixels=options.max_pixels)
    family = load_family(model, options.template)
    config = family.checkpoint.config.get_text_config()
    require_steady_positions(config, str(path), options.max_tokens, "model.max_tokens")
    adapter = None if options.adapter is None else Path(options.adapter)
    _require_value_head(adapter or path)
    policy = frozen_policy(family, DTYPES[options.dtype], device, adapter, is_valued=True)
    policy.model.requires_grad_(False)
    prove_where_needed(policy)
    obstacle = family.sharing_obstacle(family.language_model(policy.model).config)
    learner = PackedPolicy(policy, chosen_form("auto", device, obstacle), False)
    return ValueModel(options=options, learner=learner.eval(), vision=VisionStore(policy, 0))


def _require_value_head(directory: Path) -> None:
    file = directory / WHOLE_FILE
    if not file.is_file() or not any(name.startswith(f"{NAME}.") for name in read_tensors(file)):
        raise ModelError(f"{directory} has no value head; use a model that `tiercel reward` trained")
