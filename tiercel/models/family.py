"""What tiercel must know of an architecture, in one class per family.

A family object holds the checkpoint's config, tokenizer and image processor but no weights, so loader workers
can carry it; the methods that need weights take the model as an argument.

Shape suffixes: P prompt tokens, C completion tokens, D position dimensions (3 for M-RoPE, else 1), K vision
tokens of an image, H hidden size (for pictures: height, width).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from tiercel.config.schema import Part
from tiercel.errors import DataError
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size

HuggingFaceModel = Any  # a PreTrainedModel, whose submodules only its family knows


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The files of a checkpoint that encode prompts; no weights."""

    path: str
    config: Any  # transformers' PreTrainedConfig
    tokenizer: Any
    image_processor: Any
    chat_template: str
    end_token_ids: tuple[int, ...]


class Family(ABC):
    """One architecture: its images, its prompt tokens, its positions, its modules."""

    name: ClassVar[str]  # `model_type` in config.json
    serves: ClassVar[str]  # models, as docs/families.md lists them; so is `special`, what else is its own
    special: ClassVar[str]
    coordinate_space: ClassVar[CoordinateSpace]
    position_dimensions: ClassVar[int]
    part_prefixes: ClassVar[Mapping[Part, tuple[str, ...]]]  # the longest matching prefix decides
    image_marker: ClassVar[str]  # what the chat template writes where an image goes
    video_marker: ClassVar[str | None] = None  # the same for a video; None: the family reads none
    has_pixel_limits: ClassVar[bool]  # min_pixels and max_pixels decide an image's size; else tiles do
    image_processor_class: ClassVar[Any]  # transformers' Pillow form; the other one needs torchvision

    def __init__(self, checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None):
        self.checkpoint = checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.min_pixels = min_pixels
        self.max_pixels = max_pixels

    @property
    @abstractmethod
    def placeholder_ids(self) -> tuple[int, ...]:
        """Token ids whose embeddings are replaced by vision features; they can never be sampled."""

    @abstractmethod
    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        """Size after resizing and number of tokens, from the header's size alone; `limits` are the row's own, within
        the recipe's. Raises DataError."""

    def refuse_limits(self, limits: PixelLimits | None) -> None:
        """For families that cut tiles. Raises DataError where a row has limits of its own."""
        if limits is not None:
            key = "min_pixels" if limits.most is None else "max_pixels"
            raise DataError(f"{self.name} cuts images into tiles of one size; remove the row's {key}", field=key)

    @abstractmethod
    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        """Resize an RGB image once; every engine gets these pixels."""

    def plan_video(self, size: Size, frame_count: int, fps: float, limits: PixelLimits) -> ImagePlan:
        """As `plan_image`, for frames of one size; `limits` are a frame's. Raises DataError."""
        raise DataError(f"{self.name} reads no videos here; the families of Qwen do", field="videos")

    def encode_video(self, frames: Iterable[Image.Image], plan: ImagePlan) -> EncodedImage:
        """Resize RGB frames once, as they come; each is a view."""
        raise DataError(f"{self.name} reads no videos here; the families of Qwen do", field="videos")

    @abstractmethod
    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        """The tokens that stand for one image or video; its features go to the placeholders, in their order."""

    def unexpanded_token_ids(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> list[int]:
        """Prompt ids with one placeholder for each picture, for engines that make it as many as they need."""
        ids = token_ids_P.tolist()
        is_vision = self.is_placeholder(token_ids_P).tolist()
        kept: list[int] = []
        place = 0
        for plan in plans:
            of_image = self.image_token_ids(plan)
            before_first = self.is_placeholder(torch.tensor(of_image)).tolist().index(True)
            start = is_vision.index(True, place) - before_first
            kept += [*ids[place:start], self.placeholder_ids[0]]
            place = start + len(of_image)
        return kept + ids[place:]

    def feature_count(self, plan: ImagePlan) -> int:
        """Placeholders among the tokens of an image: K."""
        return int(self.is_placeholder(torch.tensor(self.image_token_ids(plan))).sum())

    @abstractmethod
    def positions(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        """Rotary positions, int64 (D, P), of a sequence that starts at position 0."""

    @abstractmethod
    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        """For each image features (K, H), a row for each placeholder among `image_token_ids`, in the language model's
        space; wider than H where deeper layers take some too."""

    @abstractmethod
    def language_model(self, model: HuggingFaceModel) -> nn.Module:
        """The decoder: takes `decoder_inputs`, position_ids, attention_mask; ends with the last norm."""

    def with_features(self, embeddings: Tensor, is_vision: Tensor, features_KH: Tensor) -> Tensor:
        """Token embeddings (..., H) with the features at the tokens that are vision (...), for `decoder_inputs`."""
        return embeddings.masked_scatter(is_vision[..., None], features_KH.to(embeddings.dtype))

    def decoder_inputs(self, embeddings: Tensor) -> dict[str, Any]:
        """Arguments of the decoder's forward for embeddings (rows, tokens, H), with or without features."""
        return {"inputs_embeds": embeddings}

    def part_of(self, parameter_name: str) -> Part:
        """The part that a parameter of the Hugging Face model belongs to."""
        matches = [
            (len(prefix), part)
            for part, prefixes in self.part_prefixes.items()
            for prefix in prefixes
            if parameter_name.startswith(prefix)
        ]
        return max(matches)[1] if matches else "language"

    def is_placeholder(self, token_ids: Tensor) -> Tensor:
        """Bool tensor of the same shape: which tokens take a row of vision features."""
        return torch.isin(token_ids, torch.tensor(self.placeholder_ids, device=token_ids.device))

    @property
    def feature_layers(self) -> int:
        """Features of one vision token, side by side: several where deeper layers of the decoder take some too."""
        return 1

    @property
    def vocabulary_size(self) -> int:
        """Rows of the embedding and of the head."""
        return self.checkpoint.config.get_text_config().vocab_size
