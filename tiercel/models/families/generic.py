"""Any image-text model of transformers, based on what the library declares for all of them.

The checkpoint's own processor says which tokens represent a picture, and its `_get_num_multimodal_tokens` how many,
from the size alone; if there is no such function, a blank picture of that size is encoded instead. `get_image_features`
computes their features, and `get_rope_index` the positions if a token has several. This may be wrong for some
architectures, so each checkpoint is proved: ids and pixels here against the whole processor, logprobs in
packing/forward_equivalence_check.py. Shape suffixes: docs/shapes.md.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoImageProcessor, AutoProcessor

from tiercel.config.schema import Part
from tiercel.devices import moved
from tiercel.errors import DataError, EnvironmentProblem, ModelError, TiercelError
from tiercel.models.families.base import Checkpoint, Family, HuggingFaceModel
from tiercel.models.families.image_transforms import picture_image, picture_tensor, random_picture, views_sha256
from tiercel.models.layers.value_head import NAME as VALUE_HEAD
from tiercel.models.rendering import render, token_ids
from tiercel.types import EncodedImage, EncodedPrompt, ImagePlan, Message, PixelLimits, Size

PROOF_SIZES = ((84, 56), (56, 84), (200, 90), (333, 47), (640, 480))  # of the pictures that prove ids and pixels
QUESTION = "What is this?"
KEPT_SIZES = 4096  # the number of sizes whose tokens are cached
TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
# What processors and models raise for a picture, checkpoint, arguments or shapes that they cannot process.
FAULTS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTokens:
    """What a picture of one size becomes: its tokens, and the small inputs that determine its positions."""

    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeTokens:
    """The tokens around the placeholders, if they are the same for all pictures."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class AnyImageText(Family):
    """Any image-text model, using what transformers declares for all of them. Each checkpoint is proved before it is
    used."""

    name = "transformers"
    serves = "any other image-text model of transformers that passes its proof"
    special = "tokens, features and positions by the checkpoint's own code in transformers; proved on each checkpoint"
    sizes = "takes the sizes of images from the checkpoint's processor"
    needs_proof = True

    def __init__(self, checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None):
        super().__init__(_with_start(checkpoint), min_pixels, max_pixels)
        self.own_template = checkpoint.chat_template
        self.processor = checkpoint.image_processor
        self.image_marker = None if self.processor is None else self.processor.image_token
        self.skeleton = _skeleton(checkpoint)
        self.part_prefixes = _parts(self.skeleton)  # type: ignore[misc]  # other families have it in the class
        self.position_dimensions = self._rope_positions(torch.zeros(2, dtype=torch.int64), ()).shape[0]
        self.edges: EdgeTokens | None = None
        self._sizes: dict[Size, PictureTokens] = {}

    @classmethod
    def read_image_processor(cls, path: Path) -> Any:
        """Read the whole processor of a checkpoint, which resizes pictures with Pillow if transformers supports
        that."""
        try:
            processor = AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise EnvironmentProblem(f"{path}: its processor needs a package that is not installed: {error}") from error
        needed = ("image_processor", "tokenizer", "image_token")
        if missing := [name for name in needed if getattr(processor, name, None) is None]:
            raise ModelError(
                f"{path}: {type(processor).__name__} does not declare {' or '.join(missing)}, which a model "
                "without a family of its own needs"
            )
        with suppress(ImportError, ValueError):  # a few image processors exist only for torchvision
            processor.image_processor = AutoImageProcessor.from_pretrained(
                path, backend="pil", local_files_only=True, trust_remote_code=False
            )
        return processor

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        ids = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video"))
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        return ImagePlan(original_size=size, processed_size=size, grid=(), token_count=self._count(size))

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        """Keep the picture as it is; the processor resizes it when its features are computed."""
        views = (picture_tensor(image),)
        return EncodedImage(sha256=views_sha256(views), plan=self.plan_image(image.size, limits), views=views)

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        if self.edges is None:
            return list(self._tokens_of_size(plan.original_size).ids)
        before, after = self.edges.before, self.edges.after
        between = plan.token_count - len(before) - len(after)
        return [*before, *[self.placeholder_ids[0]] * between, *after]

    def numbered(self, text: str) -> str:
        if not self._numbers:
            return text
        before, after = self.processor.image_id_start_token, self.processor.image_id_end_token
        first, *others = text.split(self.processor.image_token)
        return first + "".join(
            f"{before}{number}{after}{self.processor.image_token}{piece}" for number, piece in enumerate(others)
        )

    def positions(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        return self._rope_positions(token_ids_P, [self._tokens_of_size(plan.original_size).inputs for plan in plans])

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        make = model.model.get_image_features
        weight = model.get_input_embeddings().weight
        names = inspect.signature(make).parameters
        features = []
        for image in images:
            inputs = self.inputs_of(self.processor.image_token, [picture_image(image.views[0])])
            given = {name: _placed(inputs[name], weight) for name in inputs if name in names}
            made = make(**given).pooler_output
            parts = made if isinstance(made, list | tuple) else [made]
            features.append(torch.cat([part.flatten(0, -2) for part in parts]))
        return features

    def language_model(self, model: HuggingFaceModel) -> nn.Module:
        return model.get_decoder()

    def plain_inputs(self, prompt: EncodedPrompt, token_ids_T: Tensor) -> dict[str, Tensor]:
        inputs = self.inputs_of(prompt.text, [picture_image(image.views[0]) for image in prompt.images])
        more = len(token_ids_T) - inputs["input_ids"].shape[1]
        text = {name: pad(inputs[name], (0, more)) for name in TEXT_INPUTS if name in inputs}
        given = {"input_ids": token_ids_T[None], "attention_mask": torch.ones_like(token_ids_T)[None]}
        known = inspect.signature(self.skeleton.model.forward).parameters
        return {name: value for name, value in {**inputs, **text, **given}.items() if name in known}

    def prove_encoding(self) -> None:
        """Compare ids and pixels with the whole processor's for no picture, one picture, and two of different sizes."""
        pictures = [random_picture(size, seed) for seed, size in enumerate(PROOF_SIZES)]
        try:
            self.edges = _edges([self._tokens_of_size(picture.size).ids for picture in pictures], self.placeholder_ids)
            for shown in ([], pictures[:1], pictures[1:3], pictures[3:]):
                self._prove_prompt(shown)
        except (*FAULTS, TiercelError) as error:
            raise ModelError(f"{self.checkpoint.path} did not pass its proof: {error}") from error

    def _prove_prompt(self, shown: Sequence[Image.Image]) -> None:
        plans = [self.plan_image(picture.size) for picture in shown]
        for plan in plans:
            if (made := len(self._tokens_of_size(plan.original_size).ids)) != plan.token_count:
                raise ModelError(
                    f"a picture of {plan.original_size} pixels has {made} tokens, but its processor counts "
                    f"{plan.token_count}"
                )
        message = Message(role="user", content="<image>" * len(shown) + QUESTION)
        ours = token_ids(self, render(self, [message], add_generation_prompt=True), plans)
        content: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in shown]
        theirs = self.processor.apply_chat_template(
            [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}],
            chat_template=self.own_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in shown) or "no picture"
        if ours != (whole := theirs["input_ids"][0].tolist()):
            raise ModelError(f"the ids with {sizes} differ: tiercel has {len(ours)}, its whole processor {len(whole)}")
        if len(shown) == 1:
            alone = self.inputs_of(self.processor.image_token, shown)
            if odd := [n for n in theirs if n not in TEXT_INPUTS and not torch.equal(theirs[n], alone[n])]:
                raise ModelError(f"{odd[0]} of {sizes} differs from the result of its whole processor")

    def inputs_of(self, text: str, pictures: Sequence[Image.Image]) -> Mapping[str, Tensor]:
        """Run the whole processor on a rendered text that has the markers of these pictures, and their numbers."""
        numbers = {"use_image_id": False} if self._numbers else {}
        return self.processor(
            text=[text],
            images=list(pictures) or None,
            **numbers,
            add_special_tokens=False,
            return_mm_token_type_ids=True,
            return_tensors="pt",
        )

    @property
    def _numbers(self) -> bool:
        """Return whether the processor writes a number before each picture, as MiniCPM-V's does."""
        return bool(getattr(self.processor, "default_use_image_id", False))

    def _count(self, size: Size) -> int:
        """Count the tokens of a picture, from its size alone if the processor can do that."""
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        if count is None:
            return len(self._tokens_of_size(size).ids)
        try:
            return int(count(image_sizes=[size[::-1]])["num_image_tokens"][0])
        except FAULTS as error:
            raise _refused(size, error) from error

    def _tokens_of_size(self, size: Size) -> PictureTokens:
        if size not in self._sizes:
            if len(self._sizes) == KEPT_SIZES:
                self._sizes.clear()
            try:
                made = self.inputs_of(self.processor.image_token, [Image.new("RGB", size)])
            except FAULTS as error:
                raise _refused(size, error) from error
            small = {name: made[name] for name in self._rope_names if name in made and name not in TEXT_INPUTS}
            self._sizes[size] = PictureTokens(ids=tuple(made["input_ids"][0].tolist()), inputs=small)
        return self._sizes[size]

    @property
    def _rope_names(self) -> tuple[str, ...]:
        compute = getattr(self.skeleton.model, "get_rope_index", None)
        return () if compute is None else tuple(inspect.signature(compute).parameters)

    def _rope_positions(self, token_ids_P: Tensor, inputs: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Compute positions (D, P) as the model does. `inputs` are the inputs of each picture that determine them."""
        if not self._rope_names:
            return torch.arange(len(token_ids_P))[None]
        ids = token_ids_P[None]
        given = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": self.is_placeholder(ids).int(),
        }
        for name in inputs[0] if inputs else ():
            given[name] = torch.cat([of_picture[name] for of_picture in inputs])
        positions, _ = self.skeleton.model.get_rope_index(**{n: v for n, v in given.items() if n in self._rope_names})
        return positions[:, 0]


def _with_start(checkpoint: Checkpoint) -> Checkpoint:
    """Make the template write the token that the tokenizer puts before a text, as the whole processor does."""
    tokenizer, template = checkpoint.tokenizer, checkpoint.chat_template
    if tokenizer is None or tokenizer.bos_token_id is None or "bos_token" in template:
        return checkpoint
    if tokenizer("")["input_ids"][:1] != [tokenizer.bos_token_id] or template.startswith(tokenizer.bos_token):
        return checkpoint
    return replace(checkpoint, chat_template="{{ bos_token }}" + template)


def _skeleton(checkpoint: Checkpoint) -> HuggingFaceModel:
    """Build the model without weights, to find the names of its modules and to compute positions."""
    try:
        with torch.device("meta"):
            model = AnyImageText.model_class.from_config(checkpoint.config)
    except FAULTS as error:
        raise ModelError(f"{checkpoint.path}: transformers cannot build the model from its config: {error}") from error
    if not hasattr(getattr(model, "model", None), "get_image_features"):
        raise ModelError(f"{checkpoint.path}: {type(model).__name__} does not declare get_image_features")
    return model


def _parts(model: HuggingFaceModel) -> Mapping[Part, tuple[str, ...]]:
    """Find the prefixes of the parts. Everything outside the decoder and the tower is the projector."""
    names = {id(module): name for name, module in model.named_modules()}
    language = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    tower = model.get_encoder(modality="image")
    if language[0] is model or tower is model or id(tower) not in names:
        raise ModelError(f"{type(model).__name__} does not say which of its modules are the decoder and the tower")
    return {
        "vision": (names[id(tower)] + ".",),
        "projector": ("",),
        "language": (*(names[id(module)] + "." for module in language), VALUE_HEAD + "."),
    }


def _edges(ids_of_sizes: Sequence[tuple[int, ...]], placeholders: tuple[int, ...]) -> EdgeTokens | None:
    """Return the tokens around the placeholders of a picture, or None if other tokens lie between the placeholders or
    if the result depends on the size."""
    found = set()
    for ids in ids_of_sizes:
        places = [place for place, token in enumerate(ids) if token in placeholders[:1]]
        if not places or places[-1] - places[0] + 1 != len(places):
            return None
        found.add(EdgeTokens(before=ids[: places[0]], after=ids[places[-1] + 1 :]))
    return found.pop() if len(found) == 1 else None


def _refused(size: Size, error: Exception) -> DataError:
    return DataError(f"image of {size[0]} x {size[1]} pixels: the processor says: {error}", field="images")


def _placed(value: Any, weight: Tensor) -> Any:
    """Move an input of the tower to the weights' device, and convert floating-point numbers to their dtype."""
    if not isinstance(value, Tensor):
        return value
    placed = moved(value, weight.device)
    return placed.to(weight.dtype) if placed.is_floating_point() else placed
