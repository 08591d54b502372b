"""The policy: a family, its weights, an adapter or full fine-tuning, and the reference."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from tiercel.config.schema import BaseRecipe, GrpoRecipe, Lora, Part, Quantization, RewardRecipe
from tiercel.config.trained_parts import keeps_start, whole_parts
from tiercel.errors import ModelError
from tiercel.message_text import counted
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.loading import family_of
from tiercel.models.layers.experts import gate_names
from tiercel.models.layers.quantized import is_quantized, settle
from tiercel.models.layers.value_head import NAME as VALUE_HEAD
from tiercel.models.layers.value_head import add_value_head
from tiercel.models.weights.adapters import WHOLE_FILE as WHOLE_FILE
from tiercel.models.weights.adapters import read_adapter, start_at_rounding
from tiercel.models.weights.checkpoint_files import named_few, read_tensors, require_finite
from tiercel.models.weights.loading import DTYPES, load_weights
from tiercel.models.weights.targets import adaptable_names, adapted_names, adapter_targets, expression_of
from tiercel.types import EncodedImage

REFERENCE = "reference"  # name of the reference's adapter

warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT reads it


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The trained model. `model` is the Hugging Face model, with PEFT's layers if there is an adapter."""

    family: Family
    model: HuggingFaceModel
    peft: PeftModel | None  # None: full fine-tuning
    reference_adapter: str | None  # name of the reference's adapter (lora.init's, or one that moves); None: the base
    saves_reference: bool = False  # whether its adapter is part of a checkpoint: one that moves, or is in no file
    compute_dtype: torch.dtype
    device: torch.device

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the optimiser changes, by name, in the order of the names."""
        named = self.model.named_parameters()
        return dict(sorted((name, parameter) for name, parameter in named if parameter.requires_grad))

    @property
    def vision_is_frozen(self) -> bool:
        """Return whether vision features are the same at every step."""
        return not any(
            self.family.part_of(base_name(name)) in ("vision", "projector") for name in self.trained_parameters()
        )

    def vision_features(self, images: Sequence[EncodedImage]) -> list[Tensor]:
        """Compute the features (K, H) of each image in the recipe's dtype. Raises ModelError if their number differs
        from that of the image's placeholders."""
        with self.autocast():
            features = self.family.vision_features(self.model, images)
        for image, features_KH in zip(images, features, strict=True):
            if len(features_KH) != (places := self.family.feature_count(image.plan)):
                raise ModelError(
                    f"the model makes {len(features_KH)} features for a picture of {image.plan.processed_size} "
                    f"pixels that has {places} placeholders in the prompt; the checkpoint's config and its image "
                    "processor do not match"
                )
        return features

    @property
    def needs_autocast(self) -> bool:
        """Return whether float32 weights (an adapter's, or all in full fine-tuning) compute in a narrower dtype."""
        has_float32 = self.peft is not None or next(self.model.parameters()).dtype == torch.float32
        return has_float32 and self.compute_dtype in (torch.bfloat16, torch.float16)

    def autocast(self, *, keeps_casts: bool = True) -> torch.autocast:
        """Return the context in which every forward pass runs. With `keeps_casts`, weights are cast once instead of at
        every use, which a captured graph must not rely on."""
        enabled = self.needs_autocast
        return torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=enabled, cache_enabled=enabled and keeps_casts
        )

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters that are not part of an adapter."""
        return {name: parameter for name, parameter in self.trained_parameters().items() if ".lora_" not in name}

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Switch to the reference: disable the adapter, or replace it with the reference's. Weights that are trained
        whole are swapped by the strategy, not here."""
        if self.peft is None:
            yield
            return
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
    """Return a parameter's name in the model without PEFT's layers."""
    return re.sub(r"\.(lora_\w+\.\w+|base_layer)(?=\.)", "", name)


def build_policy(
    recipe: BaseRecipe, device: torch.device, weights: Path | None = None, *, stays_on_cpu: bool = False
) -> Policy:
    """Load the checkpoint and make the recipe's parameters trainable. `weights`: in full fine-tuning, a model directory
    to continue from. `stays_on_cpu`: leave the weights on the CPU, where a strategy moves their shares to the device.
    Raises ModelError if checkpoint and recipe do not fit together."""
    family = family_of(recipe)
    place = torch.device("cpu") if stays_on_cpu else device
    dtype, quantize = DTYPES[recipe.model.dtype], recipe.model.quantize
    if recipe.lora is not None and whole_parts(recipe):
        model = load_weights(family, torch.float32, place if quantize else torch.device("cpu"), quantize=quantize)
        _lower_precision(family, model, whole_parts(recipe), dtype)
        if is_quantized(model):
            settle(model, dtype)
        else:
            model.to(place)
    else:
        model = load_weights(family, weights_dtype(recipe), place, weights, quantize)
    if is_quantized(model) and (recipe.lora is None or stays_on_cpu):
        raise ModelError(
            f"{family.checkpoint.path}: its weights are quantised, so they stay unchanged, and whole on every rank; "
            "add the section lora, and set train.strategy: single or ddp"
        )
    policy = make_trainable(family, model, recipe, device)
    if isinstance(recipe, RewardRecipe):  # the value head, if a reward model continues training
        read_whole(model, weights or Path(family.checkpoint.path))
    return policy


def weights_dtype(recipe: BaseRecipe) -> torch.dtype:
    """Return the dtype of the loaded weights: the recipe's if they are frozen, float32 if they are trained."""
    return DTYPES[recipe.model.dtype] if recipe.lora is not None else torch.float32


def _lower_precision(family: Family, model: HuggingFaceModel, whole: tuple[Part, ...], dtype: torch.dtype) -> None:
    """Convert the parts that stay frozen to `dtype`."""
    for name, parameter in model.named_parameters():
        if family.part_of(name) not in whole and parameter.is_floating_point():  # other numbers are quantised
            parameter.data = parameter.data.to(dtype)


def starting_weights(policy: Policy, recipe: BaseRecipe, weights: Path | None = None) -> dict[str, Tensor]:
    """Copy the weights that are trained whole, as they were at the start of the run, if a KL penalty needs them;
    otherwise return an empty dict. The copies have the recipe's dtype. `weights`: as in `build_policy`."""
    if not keeps_start(recipe):
        return {}
    dtype = policy.compute_dtype
    origin = policy.model if weights is None else load_weights(policy.family, dtype, torch.device("cpu"))
    named = dict(origin.named_parameters())
    return {name: named[name].detach().to(dtype, copy=True) for name in policy.whole_parameters()}


def make_trainable(family: Family, model: HuggingFaceModel, recipe: BaseRecipe, device: torch.device) -> Policy:
    """Add the recipe's adapter to a loaded model, or make all parts trainable that the recipe does not freeze. A reward
    model gets a value head, and its language head stays as it is."""
    if isinstance(recipe, RewardRecipe):
        add_value_head(model)
    reference_adapter = None
    peft = None
    moves = isinstance(recipe, GrpoRecipe) and recipe.algorithm.kl.sync_every is not None
    saves_reference = moves or (recipe.lora is not None and recipe.lora.start is not None and recipe.has_reference)
    if recipe.lora is not None:
        peft = _add_adapter(family, model, recipe.lora, recipe.train.seed)
        if recipe.lora.start is not None:
            with torch.random.fork_rng():
                torch.manual_seed(recipe.train.seed)
                start_at_rounding(family, model, DTYPES[recipe.model.dtype])
        if recipe.lora.init is None and saves_reference:
            _add_copy(peft)
        reference_adapter = REFERENCE if saves_reference or recipe.lora.init is not None else None
    _unfreeze(family, model, recipe)
    words, states = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if isinstance(recipe, RewardRecipe) and words is not states:
        states.requires_grad_(False)
    leave_casting_to_autocast(model)
    return Policy(
        family=family,
        model=model,
        peft=peft,
        reference_adapter=reference_adapter,
        saves_reference=saves_reference,
        compute_dtype=DTYPES[recipe.model.dtype],
        device=device,
    )


def load_for_inference(recipe: BaseRecipe, device: torch.device, adapter: Path | None) -> Policy:
    """Load a checkpoint, with an adapter if one is given, for evaluation and prediction. No parameter is trainable."""
    family = family_of(recipe)
    return frozen_policy(
        family,
        DTYPES[recipe.model.dtype],
        device,
        adapter,
        is_valued=isinstance(recipe, RewardRecipe),
        quantize=recipe.model.quantize,
    )


def load_start(recipe: BaseRecipe, device: torch.device) -> Policy:
    """Load the model that a run of the recipe starts from, for evaluation. No parameter is trainable."""
    lora = recipe.lora
    if lora is None or lora.start is None:
        return load_for_inference(recipe, device, None if lora is None or lora.init is None else Path(lora.init))
    policy = build_policy(recipe, device)  # its adapter compensates for the rounding of the weights
    policy.model.requires_grad_(False)
    return policy


def frozen_policy(
    family: Family,
    compute_dtype: torch.dtype,
    device: torch.device,
    adapter: Path | None,
    *,
    is_valued: bool,
    quantize: Quantization | None = None,
) -> Policy:
    """Load the weights of a family, with an adapter if one is given. `is_valued` marks a reward model, whose value head
    lies next to the adapter or the weights; if there is none, all values are 0."""
    model = load_weights(family, compute_dtype, device, quantize=quantize)
    peft = None
    if is_valued:
        add_value_head(model)
        read_whole(model, Path(family.checkpoint.path))
    if adapter is not None:
        peft = read_adapter(model, adapter)
        read_whole(model, adapter)
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
    """Stop PEFT from converting the input of every adapter to float32, the dtype of its weights. On a GPU the products
    would be several times slower, and a copy of each input would be kept for the backward pass."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def _initial_adapter(family: Family, model: HuggingFaceModel, lora: Lora, directory: Path) -> PeftModel:
    """Load the adapter of `lora.init` for training, and a frozen copy as the reference. Its dropout is the recipe's.
    Raises ModelError if it is not the adapter that the recipe describes."""
    if (directory / WHOLE_FILE).is_file():
        raise ModelError(
            f"lora.init: {directory} needs weights that its run trained whole; `tiercel export RUN --merge` merges "
            "both into one model: set model.path to that model and remove lora.init"
        )
    asked = adapter_targets(family, model, lora).names(model)
    adaptable = adaptable_names(model)
    peft = read_adapter(model, directory, lora.dropout)
    given = peft.peft_config["default"]
    assert isinstance(given, LoraConfig)
    kind = "dora" if given.use_dora else "rslora" if given.use_rslora else "lora"
    there = {"rank": given.r, "alpha": given.lora_alpha, "kind": kind}
    for key, value in there.items():
        if value != (here := getattr(lora, key)):
            here, value = (each if isinstance(each, str) else f"{each:g}" for each in (here, value))
            raise ModelError(
                f"lora.init: {directory} has {key} {value}, but the recipe has {here}; set lora.{key}: {value}"
            )
    if (adapted := adapted_names(model)) != asked:
        raise ModelError(
            f"lora.init: {directory} adapts {counted(len(adapted), 'layer')}, but lora.targets: {lora.targets} names "
            f"{len(asked)}. Only in the adapter: {named_few(adapted - asked) or 'none'}. Only in lora.targets: "
            f"{named_few(asked - adapted) or 'none'}. Set lora.targets: "
            f"'{expression_of(adapted, adaptable - adapted)}'"
        )
    _add_copy(peft)
    return peft


def _add_adapter(family: Family, model: HuggingFaceModel, lora: Lora, seed: int) -> PeftModel:
    if lora.init is not None:
        return _initial_adapter(family, model, lora, Path(lora.init))
    config = adapter_targets(family, model, lora).config(lora)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def _add_copy(peft: PeftModel) -> None:
    """Add a frozen copy of the adapter as the start of the reference."""
    with torch.random.fork_rng():
        peft.add_adapter(REFERENCE, peft.peft_config["default"])
    named = dict(peft.named_parameters())
    for name, parameter in named.items():
        if ".lora_" in name and f".{REFERENCE}." in name:
            parameter.data.copy_(named[name.replace(f".{REFERENCE}.", ".default.")].data)
    peft.set_adapter("default")


def read_whole(model: HuggingFaceModel, directory: Path) -> set[str]:
    """Load the weights that a run trained whole into the model, if the adapter's directory has any, and return their
    names. Raises ModelError if they belong to another model."""
    if not (directory / WHOLE_FILE).is_file():
        return set()
    parameters = dict(model.named_parameters())
    tensors = read_tensors(directory / WHOLE_FILE)
    require_finite(tensors, directory / WHOLE_FILE)
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ModelError(f"{directory / WHOLE_FILE}: this model has no weight {name} of shape {list(tensor.shape)}")
        parameters[name].data = tensor.to(parameters[name].device)
    return set(tensors)


def _unfreeze(family: Family, model: HuggingFaceModel, recipe: BaseRecipe) -> None:
    """Make the parts trainable that the recipe trains whole, except for the gates of mixtures. Raises ModelError if a
    part has no parameters, or has an adapter too."""
    parts = {name: family.part_of(base_name(name)) for name, _ in model.named_parameters()}
    gates = tuple(f"{name}." for name in gate_names(model))
    whole = whole_parts(recipe)
    frozen = () if family.image_marker is None else recipe.freeze  # a text-only model has no tower to freeze
    named, remedy = (set(frozen), "take it out of") if recipe.lora is None else (set(whole), "add it to")
    if missing := sorted(named - set(parts.values())):
        raise ModelError(f"freeze: this model has no parameters in {', '.join(missing)}; {remedy} freeze")
    adapted = {part for name, part in parts.items() if ".lora_" in name}
    if both := sorted(adapted & set(whole)):
        raise ModelError(
            f"freeze: {both[0]} is to be trained whole, but lora.targets adapts layers of it; add it to freeze"
        )
    for name, parameter in model.named_parameters():
        if name.startswith(f"{VALUE_HEAD}.") or (parts[name] in whole and not name.startswith(gates)):
            parameter.requires_grad_(True)
