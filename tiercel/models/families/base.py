"""The base class of families. One class holds everything that tiercel must know about one architecture.

A family object has the checkpoint's config, tokenizer and image processor but no weights, so that loader workers can
hold it. Methods that need weights get the model as an argument. Shape suffixes: docs/shapes.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from typing_extensions import Self

from tiercel.config.schema import Part
from tiercel.errors import DataError, ModelError
from tiercel.message_text import brief
from tiercel.models.families.image_transforms import picture_tensor, resized, views_sha256
from tiercel.models.layers.attention import shared_prefix_obstacle
from tiercel.models.layers.attention_span import Span
from tiercel.types import CoordinateSpace, EncodedImage, EncodedPrompt, ImagePlan, PixelLimits, Row, Size

HuggingFaceModel = Any  # a PreTrainedModel; only its family knows its submodules
Tools = tuple[Mapping[str, Any], ...]  # JSON schemas, in the form of chat templates
ENVIRONMENT_COLUMN = "environment"  # of rows, where the recipe has several environments


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The parts of a checkpoint that encode prompts, without weights."""

    path: str
    config: Any  # transformers' PreTrainedConfig
    tokenizer: Any
    image_processor: Any
    chat_template: str
    end_token_ids: tuple[int, ...]  # each ends a completion; the first also ends the turns that are trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnd:
    """What a chat template writes after an assistant's turn."""

    text: str  # all of it; blank: the template writes no end
    token: int | None  # the first token in it that is not plain text


class Family(ABC):
    """One architecture: its images, its prompt tokens, its positions and its modules."""

    name: ClassVar[str]  # `model_type` in config.json
    serves: ClassVar[str]  # its models, for the table of docs/families.md
    special: ClassVar[str]  # how it differs from other families, for the same page
    vllm: ClassVar[str] = "not tried"  # what was seen of vLLM 0.32 with adapters, for the same page
    coordinate_space: ClassVar[CoordinateSpace | None] = None  # of boxes; None: not documented, the recipe may say it
    position_dimensions: int = 1  # 3: M-RoPE
    part_prefixes: ClassVar[Mapping[Part, tuple[str, ...]]]  # the longest match decides; none: language
    image_marker: str | None = None  # what the chat template writes in place of an image; None: no pictures
    around_image: ClassVar[tuple[str, str]] = ("", "")  # text that the processor adds before and after each image
    video_marker: ClassVar[str | None] = None  # the same for a video; None: the family does not read videos
    marker_is_placeholder: ClassVar[bool] = True  # false: the marker represents several tokens with other names
    has_pixel_limits: ClassVar[bool] = False  # true: min_pixels and max_pixels decide an image's size; false: tiles do
    sizes: ClassVar[str] = "cuts images into tiles of one size"  # why it has no pixel limits
    image_processor_class: ClassVar[Any] = None  # of transformers, which uses Pillow and needs no torchvision
    model_class: ClassVar[Any] = AutoModelForImageTextToText
    needs_proof: ClassVar[bool] = False  # true: one class for many architectures (packing/forward_equivalence_check.py)
    turn_end: TurnEnd | None = None  # what the chat template writes after an assistant's turn; None: unknown
    turn_tokens: tuple[str, ...] = ()  # special tokens that the chat template writes around a question
    unshared: str | None = None  # why a proof did not let completions share their prompt

    def __init__(self, checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None):
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.tools: Tools = ()  # that the policy may call
        self.tools_by_environment: Mapping[
            str, Tools
        ] = {}  # by the name in a row's column; empty: all rows have `tools`
        self.min_pixels = min_pixels
        self.max_pixels = max_pixels

    @classmethod
    def read_image_processor(cls, path: Path) -> Any:
        """Read the image processor of a checkpoint, or return None for a family without pictures."""
        if cls.image_processor_class is None:
            return None
        return cls.image_processor_class.from_pretrained(path, local_files_only=True)

    def take_coordinates(self, given: CoordinateSpace | None) -> None:
        """Set the coordinate space of boxes from the recipe. Raises ModelError if the family documents its own or reads
        no pictures."""
        if given is None:
            return
        if self.image_marker is None:
            raise ModelError(f"data.coordinates: is {given}, but {self.name} does not read pictures; remove this key")
        if self.coordinate_space is not None:
            raise ModelError(
                f"data.coordinates: is {given}, but {self.name} writes boxes in {self.coordinate_space}; remove this "
                "key"
            )
        self.coordinate_space = given  # type: ignore[misc]  # other families have it in the class

    def environment_of(self, row: Row) -> str | None:
        """Return the name of a row's environment, or None if all rows have the same. Raises DataError if the row names
        none, or one that the recipe does not have."""
        names = self.tools_by_environment
        if not names:
            return None
        listed, named = " or ".join(names), row.columns.get(ENVIRONMENT_COLUMN)
        if named is None:
            raise DataError(f"does not name an environment; use {listed}", field=ENVIRONMENT_COLUMN)
        if not isinstance(named, str) or named not in names:
            raise DataError(
                f"is {brief(repr(named), 60)}, which is not a name in rollout.environment; use {listed}",
                field=ENVIRONMENT_COLUMN,
            )
        return named

    def for_row(self, row: Row) -> Self:
        """Return the family with the tools of the row's environment. Raises DataError as `environment_of` does."""
        name = self.environment_of(row)
        return self if name is None else self.with_tools(self.tools_by_environment[name])

    def with_tools(self, tools: Tools) -> Self:
        """Return the family with these tools for all rows."""
        family = copy(self)
        family.tools, family.tools_by_environment = tools, {}
        return family

    def prove_encoding(self) -> None:  # noqa: B027  # most families need no proof
        """Compare ids and pixels with those of the checkpoint's whole processor, if the family needs a proof. Raises
        ModelError if they differ."""

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Return the token ids whose embeddings are replaced by vision features. They are never sampled."""
        return (self.checkpoint.config.image_token_id,)

    @abstractmethod
    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        """Plan the size after resizing and the number of tokens from the image's size. `limits` are the row's. Raises
        DataError for an image that the family cannot process, and for limits outside the recipe's."""

    @property
    def architecture(self) -> str:
        """Return the family's name, and the architecture's if the family serves several."""
        return f"{self.name} ({self.checkpoint.config.model_type})" if self.needs_proof else self.name

    def refuse_limits(self, limits: PixelLimits | None) -> None:
        """Raise DataError if a row has limits, for families without pixel limits."""
        if limits is not None:
            key = "min_pixels" if limits.most is None else "max_pixels"
            raise DataError(f"{self.name} {self.sizes}; remove the row's {key}", field=key)

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        """Resize an RGB image, here to one view. Every engine gets these pixels. Raises DataError like `plan_image`."""
        plan = self.plan_image(image.size, limits)
        view = picture_tensor(resized(image, plan.processed_size, self.checkpoint.image_processor.resample))
        return EncodedImage(sha256=views_sha256((view,)), plan=plan, views=(view,))

    def plan_video(self, size: Size, frame_count: int, fps: float, limits: PixelLimits) -> ImagePlan:
        """Plan a video as `plan_image` plans an image. All frames have `size`; `limits` apply to one frame. Raises
        DataError."""
        raise DataError(f"{self.name} does not read videos here; the Qwen families do", field="videos")

    def encode_video(self, frames: Iterable[Image.Image], plan: ImagePlan) -> EncodedImage:
        """Resize RGB frames, one after the other. Each becomes a view."""
        raise DataError(f"{self.name} does not read videos here; the Qwen families do", field="videos")

    def told_fps(self, plan: ImagePlan) -> float:
        """Return the frames per second of a video that make an engine compute the same tokens and positions."""
        assert plan.fps is not None
        return plan.fps

    @abstractmethod
    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        """Return the tokens that represent one image or video. Its features replace the placeholders in order."""

    def unexpanded_token_ids(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> list[int]:
        """Return the prompt's ids with one placeholder for each image or video, for engines that repeat it
        themselves."""
        ids = token_ids_P.tolist()
        is_vision = self.is_placeholder(token_ids_P).tolist()
        kept: list[int] = []
        place = 0
        for plan in plans:
            of_image = self.image_token_ids(plan)
            before_first = self.is_placeholder(torch.tensor(of_image)).tolist().index(True)
            start = is_vision.index(True, place) - before_first
            kept += [*ids[place:start], self.placeholder_ids[plan.fps is not None]]
            place = start + len(of_image)
        return kept + ids[place:]

    def numbered(self, text: str) -> str:
        """Return a rendered conversation with the number that the processor writes before each picture. Most write
        none."""
        return text

    def picture_spans(self, token_ids_P: Tensor) -> tuple[Span, ...]:
        """Return the spans of tokens that see each other in both directions. Most families have none."""
        return ()

    def feature_count(self, plan: ImagePlan) -> int:
        """Return the number of placeholders among the tokens of an image, K."""
        return int(self.is_placeholder(torch.tensor(self.image_token_ids(plan))).sum())

    def positions(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        """Compute the rotary positions, int64 (D, P), of a sequence that starts at position 0; by default 0, 1, 2 .."""
        return torch.arange(len(token_ids_P))[None]

    @abstractmethod
    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        """Compute features (K, H) of each image, one row for each placeholder among `image_token_ids`. The shape is (K,
        Z) if deeper layers of the decoder take features too."""

    def tower_of_spans(self, model: HuggingFaceModel) -> nn.Module | None:
        """Return a vision tower that takes all pictures as one row in which each attends to itself, or None if each
        picture is a row of a batch."""
        return None

    def language_model(self, model: HuggingFaceModel) -> nn.Module:
        """Return the decoder, which accepts `decoder_inputs`, position_ids and attention_mask, and ends with the last
        norm."""
        return model.model.language_model

    def embedding(self, model: HuggingFaceModel) -> Any:
        """Return the module that embeds token ids (rows, tokens) for `with_features` and `decoder_inputs`."""
        return model.get_input_embeddings()

    def sharing_obstacle(self, config: Any) -> str | None:
        """Return why completions cannot share their prompt, or None if they can. `config` is the decoder's."""
        return shared_prefix_obstacle(config) or self.unshared

    def plain_inputs(self, prompt: EncodedPrompt, token_ids_T: Tensor) -> dict[str, Tensor]:
        """Return the arguments of the whole model's own forward pass for a prompt and what follows it, for a proof."""
        raise NotImplementedError

    def with_features(self, embeddings: Tensor, is_vision: Tensor, features_KH: Tensor) -> Tensor:
        """Replace the embeddings (..., H) of the tokens where `is_vision` (...) is true with the features, and return
        the result for `decoder_inputs`."""
        # Boolean indexing, and masked_scatter in its backward pass, would wait for the device to count the tokens.
        places_K = torch.nonzero_static(is_vision.flatten(), size=len(features_KH))[:, 0]
        replaced = embeddings.flatten(0, -2).index_copy(0, places_K, features_KH.to(embeddings.dtype))
        return replaced.view(embeddings.shape)

    def decoder_inputs(self, embeddings: Tensor) -> dict[str, Any]:
        """Return the arguments of the decoder's forward pass for embeddings (rows, tokens, H), with or without
        features."""
        return {"inputs_embeds": embeddings}

    def save(self, model: HuggingFaceModel, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write config and weights as in the published checkpoints, so that other engines can read them. `weights`
        replace the model's."""
        model.save_pretrained(directory, state_dict=None if weights is None else dict(weights))

    def part_of(self, parameter_name: str) -> Part:
        """Return the part of the model that holds a parameter of the Hugging Face model."""
        matches = [
            (len(prefix), part)
            for part, prefixes in self.part_prefixes.items()
            for prefix in prefixes
            if parameter_name.startswith(prefix)
        ]
        return max(matches)[1] if matches else "language"

    def is_placeholder(self, token_ids: Tensor) -> Tensor:
        """Return which tokens are replaced by vision features: bool, in the shape of `token_ids`."""
        found = torch.zeros_like(token_ids, dtype=torch.bool)
        for placeholder in self.placeholder_ids:
            found |= token_ids == placeholder
        return found

    @property
    def feature_layers(self) -> int:
        """Return the number of features per vision token, Z / H, which is more than 1 if deeper layers of the decoder
        take some."""
        return 1

    @property
    def logit_cap(self) -> float | None:
        """Return c if logits x become c tanh(x / c), otherwise None."""
        return getattr(self.checkpoint.config.get_text_config(), "final_logit_softcapping", None)

    @cached_property
    def anchor(self) -> list[int]:
        """Return the ids of a line break if the tokenizer begins every text with a space of its own, as LLaVA-1.5's
        does, otherwise none. Text behind them is tokenised as within a text."""
        alone, anchor, behind = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "\n", "\na")
        )
        return anchor if behind[: len(anchor)] == anchor and behind != anchor + alone else []

    @cached_property  # transformers looks for the config of the text each time
    def vocabulary_size(self) -> int:
        """Return the number of rows of the embedding and of the head, V."""
        return self.checkpoint.config.get_text_config().vocab_size
