"""Numbers of weights, counted on a model that is built on torch's meta device from its config alone."""

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from tiercel.config.schema import BaseRecipe, Model, Quantization
from tiercel.distributed.strategies.muon import layer_matrices
from tiercel.errors import ModelError
from tiercel.models.families.base import Checkpoint, Family
from tiercel.models.families.loading import family_class
from tiercel.models.layers.attention import heads_of
from tiercel.models.layers.experts import experts_of_a_token
from tiercel.models.layers.quantized import STORED_BYTES, quantizable, require_linear_layers, stored_quantization
from tiercel.models.policy import make_trainable, weights_dtype
from tiercel.models.weights.hub import CONFIG, resolve
from tiercel.rollout.local.decoding_weights import joined_adapters

DELTA = "linear_attention"  # the kind of a delta net's layer in config.json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """The sizes of a model with its adapter, in elements unless stated otherwise."""

    layers: int
    hidden: int
    feature_width: int  # of a vision token
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    language_weights: int  # decoder layers, embedding, head and last norm, without adapter; a tied matrix counts once
    root_weights: int  # of these, all but the decoder layers
    largest_layer: int
    vision_weights: int  # tower and projector
    adapter: int
    vision_adapter: int  # of these
    joined_adapter: int  # zeros in the wider matrices of adapters that a GPU decodes with at once
    trained: int
    trained_vision: int  # of these
    trained_matrices: int  # of `trained`: what Muon updates
    obstacle: str | None  # why completions cannot share their prompt
    expert_weights: int  # of the experts of all layers, without the one that all tokens share
    expert_share: float  # of the experts of a layer, the share that a token uses; 1 without experts
    cached_layers: int  # layers that keep keys and values of each token
    state_elements: int  # of a row, in layers that keep a state instead
    quantize: Quantization | None
    quantized: int = 0  # of language_weights
    largest_quantized: int = 0  # of one matrix

    def language_bytes(self, width: int) -> int:
        """Return the bytes of the language model's weights, with `width` bytes for each that is not quantised."""
        each = STORED_BYTES[self.quantize] if self.quantize else width
        return width * (self.language_weights - self.quantized) + round(each * self.quantized)

    def dequantising_bytes(self, width: int) -> int:
        """Return the bytes that are moved to dequantise all weights once: what is read, and what is written with
        `width` bytes each."""
        return round((STORED_BYTES[self.quantize] + width) * self.quantized) if self.quantize else 0

    @property
    def active_weights(self) -> int:
        """Return the number of the language model's weights that one token uses."""
        return self.weights_used_by(1)

    def weights_used_by(self, tokens: int) -> int:
        """Return the number of the language model's weights that at least one of the tokens uses, if each chooses
        experts at random."""
        return self.language_weights - round(self.expert_weights * (1 - self.expert_share) ** tokens)

    @property
    def weights(self) -> int:
        return self.language_weights + self.vision_weights


def read_config(model: Model) -> tuple[Path, Any]:
    """Return the directory and the config of a checkpoint. Its weights need not be present; only config.json is fetched
    from a hub."""
    path = resolve(model, files=CONFIG)
    family_class(path)  # refuses remote code and unknown architectures
    return path, AutoConfig.from_pretrained(path, local_files_only=True)


def bare_family(path: Path, config: Any) -> Family:
    """Build a family that knows the architecture but cannot encode, because it has no tokenizer."""
    checkpoint = Checkpoint(
        path=str(path), config=config, tokenizer=None, image_processor=None, chat_template="", end_token_ids=()
    )
    return family_class(path)(checkpoint, None, None)


def count(recipe: BaseRecipe, config: Any, family: Family) -> ModelSizes:
    """Count the sizes of the recipe's model and adapter over all layers, because layers may differ."""
    with torch.device("meta"):
        model = family.model_class.from_config(config, dtype=weights_dtype(recipe), attn_implementation="sdpa")
        model.requires_grad_(False)
        make_trainable(family, model, without_files(recipe), torch.device("meta"))
    if recipe.model.quantize is not None:
        require_linear_layers(model, recipe.model.quantize)
    text = config.get_text_config()
    heads = max(heads_of(text), key=lambda heads: heads.size * heads.keys)
    parameters = dict(model.named_parameters())
    vision = {name: p for name, p in parameters.items() if family.part_of(name) != "language"}
    language = {name: p for name, p in parameters.items() if name not in vision}
    layers = [_elements(dict(layer.named_parameters())) for layer in _layers_of(family.language_model(model))]
    # Experts are the weights with three dimensions, whether or not there is an adapter too.
    experts = sum(p.numel() for name, p in language.items() if ".experts." in name and p.ndim == 3)
    expert_count = (getattr(text, "num_experts", None) or text.num_local_experts) if experts else 1
    quantize = recipe.model.quantize or stored_quantization(config.to_dict(), str(family.checkpoint.path))
    quantised = quantizable(family, model, quantize) if quantize else []
    matrices = [model.get_parameter(f"{name}.weight").numel() for name in quantised]
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    return ModelSizes(
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        feature_width=text.hidden_size * family.feature_layers,
        heads=text.num_attention_heads,
        key_heads=heads.keys,
        head_size=heads.size,
        vocabulary=text.vocab_size,
        language_weights=_elements(language),
        root_weights=_elements(language) - sum(layers),
        largest_layer=max(layers),
        vision_weights=_elements(vision),
        adapter=_elements(parameters, adapter=True),
        vision_adapter=_elements(vision, adapter=True),
        joined_adapter=_widening(family.language_model(model)),
        trained=_trained(parameters),
        trained_vision=_trained(vision),
        trained_matrices=_trained({name: parameters[name] for name in layer_matrices(model) & parameters.keys()}),
        obstacle=family.sharing_obstacle(text),
        expert_weights=experts,
        expert_share=experts_of_a_token(text) / expert_count if experts else 1.0,
        cached_layers=text.num_hidden_layers - kinds[DELTA],
        state_elements=kinds[DELTA] * _state_elements(text) if kinds[DELTA] else 0,
        quantize=quantize,
        quantized=sum(matrices),
        largest_quantized=max(matrices, default=0),
    )


def without_files(recipe: BaseRecipe) -> BaseRecipe:
    """Return the recipe with a new adapter instead of one that would be read from a file. It has the same shapes."""
    if recipe.lora is None:
        return recipe
    return recipe.with_values({"lora.init": None, "lora.start": None})


def with_layers(config: Any, layers: int) -> Any:
    """Return the config with another number of decoder layers."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = (list(text.layer_types) * layers)[:layers]
    if getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0  # the layers that compute keys and values are the larger ones
    return small


def _state_elements(text: Any) -> int:
    """Count what a delta net keeps for a row: its state, and the last inputs of its convolution."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return values * text.linear_key_head_dim + (2 * keys + values) * text.linear_conv_kernel_dim


def _layers_of(language: nn.Module) -> nn.ModuleList:
    layers = getattr(language, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(language).__name__} has no list of decoder layers, which a plan needs to count")
    return layers


def _widening(language_model: nn.Module) -> int:
    """Count the zeros of second matrices that take the ranks of all adapters of a group."""
    return sum(
        second.out_features * (sum(first.out_features for first, _ in adapters) - second.in_features)
        for adapters in joined_adapters(language_model)
        for _, second in adapters
    )


def _elements(parameters: dict[str, nn.Parameter], *, adapter: bool = False) -> int:
    return sum(p.numel() for name, p in parameters.items() if (".lora_" in name) == adapter)


def _trained(parameters: dict[str, nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters.values() if p.requires_grad)
