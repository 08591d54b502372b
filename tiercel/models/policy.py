"""The policy: a family, its weights, an adapter or full fine-tuning, and the reference it started from."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor, nn

from tiercel.config.schema import BaseRecipe, GrpoRecipe, Lora, Part
from tiercel.errors import ModelError
from tiercel.models.family import Family, HuggingFaceModel
from tiercel.models.loading import DTYPES, load_family, load_weights
from tiercel.types import EncodedImage

PARTS: tuple[Part, ...] = ("vision", "projector", "language")
REFERENCE = "reference"  # name of the reference's adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What is trained. `model` is the Hugging Face model, with PEFT's layers in place where there is an adapter."""

    family: Family
    model: HuggingFaceModel
    peft: PeftModel | None  # None: full fine-tuning
    reference_adapter: str | None  # the reference where it is not the base: lora.init's, or one that moves
    reference_moves: bool = False
    compute_dtype: torch.dtype
    device: torch.device

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimiser moves, by name, in the order of the names."""
        named = self.model.named_parameters()
        return dict(sorted((name, parameter) for name, parameter in named if parameter.requires_grad))

    @property
    def vision_is_frozen(self) -> bool:
        """Whether vision features are the same at every step."""
        return not any(
            self.family.part_of(base_name(name)) in ("vision", "projector") for name in self.trained_parameters()
        )

    @property
    def head_is_frozen(self) -> bool:
        return not self.model.get_output_embeddings().weight.requires_grad

    def vision_features(self, images: Sequence[EncodedImage]) -> list[Tensor]:
        """For each image features (K, H), computed in the recipe's dtype. Raises ModelError where they are not as many
        as the image has places."""
        with self.autocast():
            features = self.family.vision_features(self.model, images)
        for image, features_KH in zip(images, features, strict=True):
            if len(features_KH) != (places := self.family.feature_count(image.plan)):
                raise ModelError(
                    f"the model makes {len(features_KH)} features of a picture of {image.plan.processed_size} "
                    f"pixels that has {places} places in the prompt; its config and its image processor disagree"
                )
        return features

    @property
    def needs_autocast(self) -> bool:
        """Adapters, and in full fine-tuning all weights, are float32 and compute in the recipe's dtype."""
        has_float32 = self.peft is not None or next(self.model.parameters()).dtype == torch.float32
        return has_float32 and self.compute_dtype in (torch.bfloat16, torch.float16)

    def autocast(self, *, keeps_casts: bool = True) -> torch.autocast:
        """What every forward pass runs in. `keeps_casts`: weights are cast once, not at every use, which no captured
        graph may rely on."""
        enabled = self.needs_autocast
        return torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=enabled, cache_enabled=enabled and keeps_casts
        )

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """The policy that the run started from, or what it has moved to: the adapter off, or another in its place."""
        if self.peft is None:
            raise ModelError("a KL penalty needs an adapter: full fine-tuning keeps no copy of its start")
        if self.reference_adapter is None:
            with self.peft.disable_adapter():
                yield
            return
        self.peft.set_adapter(self.reference_adapter, inference_mode=True)
        try:
            yield
        finally:
            self.peft.set_adapter("default")


def base_name(name: str) -> str:
    """A parameter's name in the model without PEFT's layers."""
    return re.sub(r"\.(lora_[A-Z]\w*\.\w+|base_layer)(?=\.)", "", name)


def build_policy(
    recipe: BaseRecipe, device: torch.device, weights: Path | None = None, *, stays_on_cpu: bool = False
) -> Policy:
    """Load the checkpoint and make trainable what the recipe says. `weights`: a model directory to go on from in
    full fine-tuning. `stays_on_cpu`: a strategy moves the parts to the device, which may not hold the whole."""
    family = load_family(recipe.model, recipe.data.template)
    place = torch.device("cpu") if stays_on_cpu else device
    model = load_weights(family, weights_dtype(recipe), place, weights)
    return make_trainable(family, model, recipe, device)


def weights_dtype(recipe: BaseRecipe) -> torch.dtype:
    """Frozen weights lie in the dtype that computes; trained ones in float32."""
    return DTYPES[recipe.model.dtype] if recipe.lora is not None else torch.float32


def make_trainable(family: Family, model: HuggingFaceModel, recipe: BaseRecipe, device: torch.device) -> Policy:
    """A loaded model with the recipe's adapter, or with what it does not freeze trainable."""
    reference_adapter = None
    peft = None
    moves = isinstance(recipe, GrpoRecipe) and recipe.algorithm.kl.sync_every is not None
    if recipe.lora is not None:
        peft = _add_adapter(family, model, recipe.lora, recipe.train.seed)
        if moves and recipe.lora.init is None:
            _add_copy(peft)
        reference_adapter = REFERENCE if moves or recipe.lora.init is not None else None
    else:
        _unfreeze(family, model, recipe.freeze)
    leave_casting_to_autocast(model)
    return Policy(
        family=family,
        model=model,
        peft=peft,
        reference_adapter=reference_adapter,
        reference_moves=moves,
        compute_dtype=DTYPES[recipe.model.dtype],
        device=device,
    )


def load_for_inference(recipe: BaseRecipe, device: torch.device, adapter: Path | None) -> Policy:
    """A checkpoint and perhaps an adapter, for evaluation and prediction; nothing is trained."""
    family = load_family(recipe.model, recipe.data.template)
    compute_dtype = DTYPES[recipe.model.dtype]
    model = load_weights(family, compute_dtype, device)
    peft = None
    if adapter is not None:
        peft = _read_adapter(model, adapter)
        model.requires_grad_(False)
        leave_casting_to_autocast(model)
    return Policy(
        family=family,
        model=model,
        peft=peft,
        reference_adapter=None,
        compute_dtype=compute_dtype,
        device=device,
    )


def leave_casting_to_autocast(model: HuggingFaceModel) -> None:
    """PEFT would lift every adapter's input to the float32 of its weights: products several times as slow on a GPU, and
    a copy of each input kept for the backward pass."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def lora_targets(family: Family, model: HuggingFaceModel, targets: str) -> str:
    """A regular expression for PEFT: the linear layers of a part (never the head), or the user's own. Raises
    ModelError where nothing matches."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if targets in (*PARTS, "all"):
        chosen = [
            name for name in linear if name != "lm_head" and (targets == "all" or family.part_of(name + ".") == targets)
        ]
        pattern = "|".join(sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in chosen}))
    else:
        chosen = [name for name in linear if re.fullmatch(targets, name)]
        pattern = targets
    if not chosen:
        examples = ", ".join(linear[:3])
        raise ModelError(f"lora.targets: {targets!r} matches no linear layer; names look like {examples}")
    return pattern


def _initial_adapter(family: Family, model: HuggingFaceModel, lora: Lora, directory: Path) -> PeftModel:
    """The adapter of `lora.init` to train, and once more, frozen, as the reference. Raises ModelError where the recipe
    describes another."""
    pattern = lora_targets(family, model, lora.targets)
    asked = {name for name, module in model.named_modules() if re.fullmatch(pattern, name)}
    peft = _read_adapter(model, directory)
    given = peft.peft_config["default"]
    assert isinstance(given, LoraConfig)
    there = {"rank": given.r, "alpha": given.lora_alpha, "dropout": given.lora_dropout}
    here = {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
    for key, value in there.items():
        if value != here[key]:
            raise ModelError(f"lora.init: {directory} has {key} {value:g}, the recipe {here[key]:g}; make them equal")
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if odd := sorted(adapted ^ asked):
        raise ModelError(
            f"lora.init: {directory} adapts {len(adapted)} layers, lora.targets: {lora.targets} asks for {len(asked)}, "
            f"such as {odd[0]}; make them equal"
        )
    peft.load_adapter(str(directory), adapter_name=REFERENCE, is_trainable=False)
    peft.set_adapter("default")
    return peft


def _add_adapter(family: Family, model: HuggingFaceModel, lora: Lora, seed: int) -> PeftModel:
    if lora.init is not None:
        return _initial_adapter(family, model, lora, Path(lora.init))
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora_targets(family, model, lora.targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _add_copy(peft: PeftModel) -> None:
    """A frozen copy of a fresh adapter, which the reference starts from: it adds nothing yet, as the adapter itself."""
    with torch.random.fork_rng():
        peft.add_adapter(REFERENCE, peft.peft_config["default"])
    named = dict(peft.named_parameters())
    for name, parameter in named.items():
        if ".lora_" in name and f".{REFERENCE}." in name:
            parameter.data.copy_(named[name.replace(f".{REFERENCE}.", ".default.")].data)
    peft.set_adapter("default")


def _read_adapter(model: HuggingFaceModel, directory: Path) -> PeftModel:
    if not (directory / "adapter_config.json").is_file() or not (directory / "adapter_model.safetensors").is_file():
        raise ModelError(f"{directory} is no adapter: it needs adapter_config.json and adapter_model.safetensors")
    try:
        return PeftModel.from_pretrained(model, str(directory), is_trainable=True)
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelError(f"{directory}: the adapter cannot be read: {type(error).__name__}: {error}") from error


def _unfreeze(family: Family, model: HuggingFaceModel, freeze: tuple[Part, ...]) -> None:
    """Full fine-tuning: every part that is not frozen. Raises ModelError where a part has no parameters."""
    present = {family.part_of(name) for name, _ in model.named_parameters()}
    if missing := sorted(set(freeze) - present):
        raise ModelError(f"freeze: this model has no parameters in {', '.join(missing)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(family.part_of(name) not in freeze)
