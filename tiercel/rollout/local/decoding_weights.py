"""Weights for decoding: prepacked on CPUs in float32, cast once per rollout elsewhere."""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeGuard

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from tiercel.models.policy import REFERENCE, Policy

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # the layers of a block
MOST_JOINED = 192  # ranks together, as three of 64: the wider second matrices take memory
FEW_ROWS = 8  # oneDNN's order for 8 rows is good for 1 to 32 rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    weight: Tensor  # in oneDNN's order
    made_from: tuple[object, ...]


class PrepackedLinears:
    """The decoder's linear layers and the head, prepacked. `byte_limit` is how many bytes the copies may take. Layers
    beyond it are multiplied by oneDNN without a copy, which is slower. None: no layer is changed."""

    def __init__(self, policy: Policy, byte_limit: int | None):
        self.copied: list[nn.Module] = []
        self.uncopied: list[nn.Linear] = []
        self.copies: dict[nn.Module, _Copy] = {}
        if byte_limit is None or not _is_supported(policy):
            return
        head = policy.model.get_output_embeddings()
        room = byte_limit
        for module in (head, *policy.family.language_model(policy.model).children()):
            for layer in _linear_layers(module):
                size = _base(layer).weight.nbytes
                if size <= room:
                    room -= size
                    self.copied.append(layer)
                else:
                    self.uncopied.append(_base(layer))

    @contextmanager
    def of_present_weights(self) -> Iterator[None]:
        """Copy the current weights, for `in_place`. At the end the copies of trained layers are dropped; those of
        frozen layers are kept."""
        try:
            for layer in self.copied:
                made_from = _identity(layer)
                if layer not in self.copies or self.copies[layer].made_from != made_from:
                    self.copies.pop(layer, None)
                    self.copies[layer] = _Copy(weight=_reordered(_merged(layer)), made_from=made_from)
            yield
        finally:
            for layer in [layer for layer in self.copies if _is_trained(layer)]:
                del self.copies[layer]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the layers multiply by oneDNN, without gradient."""
        with replaced({layer: partial(_multiply, weight, _base(layer).bias) for layer, weight in self._weights()}):
            yield

    @property
    def held_bytes(self) -> int:
        return 0  # not counting what `rollout.prepacked_bytes` allows

    def release(self) -> None:
        """Keep the copies of frozen layers, which `rollout.prepacked_bytes` limits."""

    def _weights(self) -> Iterator[tuple[nn.Module, Tensor]]:
        yield from ((layer, self.copies[layer].weight) for layer in self.copied)
        yield from ((layer, layer.weight) for layer in self.uncopied)


@contextmanager
def replaced(forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Give layers other forward passes."""
    with ExitStack() as undo:
        for layer, forward in forwards.items():
            layer.forward = forward
            undo.callback(layer.__dict__.pop, "forward")
        yield


def _multiply(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def _reordered(weight: Tensor) -> Tensor:
    """Copy a weight in oneDNN's order. Builds of PyTorch without oneDNN lack this operator and the one in
    `_multiply`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS)


def _is_supported(policy: Policy) -> bool:
    """Return whether prepacking is used, which is only where it was measured. With other dtypes a merged adapter would
    be rounded to the dtype of the weight."""
    onednn = torch.backends.mkldnn
    return (
        policy.device.type == "cpu"
        and policy.compute_dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and onednn.is_available()
        and bool(onednn.enabled)
    )


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers whose forward pass is a product and a bias, with or without adapters."""
    if _is_mergeable(module) or (type(module) is nn.Linear and module.weight.dtype == torch.float32):
        if "forward" not in module.__dict__:  # otherwise another library has replaced it
            yield module
        return
    for child in module.children():
        yield from _linear_layers(child)


def _is_mergeable(module: nn.Module) -> bool:
    return (
        type(module) is LoraLinear
        and type(module.base_layer) is nn.Linear
        and module.base_layer.weight.dtype == torch.float32
        and not module.merged
        and not module.lora_variant
        and all(lora_B.bias is None for lora_B in module.lora_B.values())
    )


def _base(layer: nn.Module) -> nn.Linear:
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    assert isinstance(base, nn.Linear)
    return base


@torch.no_grad()
def _merged(layer: nn.Module) -> Tensor:
    """Return the weight with its active adapters merged."""
    weight = _base(layer).weight
    if isinstance(layer, LoraLinear) and not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                weight = weight + layer.get_delta_weight(name)
    return weight


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _identity(layer: nn.Module) -> tuple[object, ...]:
    """Return a value that changes when a layer gets other weights or another adapter."""
    adapters = (layer.disable_adapters, *layer.active_adapters) if isinstance(layer, LoraLinear) else ()
    return (*adapters, *((parameter.data_ptr(), parameter._version) for parameter in layer.parameters()))


class NarrowLinears:
    """Copies of the decoder's linear layers and of the head. They stay where they are from rollout to rollout, because
    captured steps read them. Adapters of layers that have the same input share one first matrix, which is the first
    matrices of all of them, and have a second one that is 0 for the others, so that a compiled step multiplies once."""

    def __init__(self, policy: Policy):
        self.dtype = policy.compute_dtype
        self.layers = _float32_layers(policy) if policy.needs_autocast else []
        self.joined = list(joined_adapters(policy.family.language_model(policy.model))) if self.layers else []
        self.copies: dict[nn.Linear, tuple[nn.Parameter, nn.Parameter | None]] = {}
        self._own: dict[nn.Linear, Tensor] = {}  # the part of a copy that is the layer's own weight

    @contextmanager
    def of_present_weights(self) -> Iterator[None]:
        """Copy the current weights, for `in_place`."""
        if not self.copies:
            self._allocate()
        for layer, (_, bias) in self.copies.items():
            self._own[layer].copy_(layer.weight)
            if bias is not None:
                bias.copy_(layer.bias)
        yield

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the copies the parameters of the layers. Other forward passes would be compiled anew for each layer."""
        with ExitStack() as undo:
            for layer, (weight, bias) in self.copies.items():
                undo.callback(partial(layer._parameters.update, dict(layer._parameters)))
                layer._parameters.update({"weight": weight, "bias": bias})
            yield

    @property
    def held_bytes(self) -> int:
        return sum(each.nbytes for each in {each for both in self.copies.values() for each in both if each is not None})

    def release(self) -> None:
        self.copies.clear()
        self._own.clear()

    def _allocate(self) -> None:
        for adapters in self.joined:
            ranks = [first.out_features for first, _ in adapters]
            shared = self._copy(adapters[0][0].weight, sum(ranks), adapters[0][0].in_features)
            for (first, second), end in zip(adapters, accumulate(ranks), strict=True):
                rows = slice(end - first.out_features, end)
                wide = self._copy(second.weight, second.out_features, sum(ranks))
                self.copies |= {first: (shared, None), second: (wide, None)}
                self._own |= {first: shared.data[rows], second: wide.data[:, rows]}
        for layer in self.layers:
            if layer not in self.copies:
                bias = None if layer.bias is None else self._copy(layer.bias, *layer.bias.shape)
                self.copies[layer] = self._copy(layer.weight, *layer.weight.shape), bias
                self._own[layer] = self.copies[layer][0].data

    def _copy(self, like: Tensor, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=self.dtype, device=like.device), requires_grad=False)


def joined_adapters(language_model: nn.Module) -> Iterator[list[tuple[nn.Linear, nn.Linear]]]:
    """Yield the two matrices of each adapter of a group of layers that have the same input. If theirs differ after all,
    the results are the same, only nothing is saved."""
    for parent in language_model.modules():
        for names in SAME_INPUT:
            layers = [layer for name in names if isinstance(layer := getattr(parent, name, None), LoraLayer)]
            adapters = [
                (first, second)
                for layer in layers
                if "default" in layer.lora_A
                and not layer.lora_variant
                and _is_float32(first := layer.lora_A["default"])
                and _is_float32(second := layer.lora_B["default"])
            ]
            if len(adapters) > 1 and sum(first.out_features for first, _ in adapters) <= MOST_JOINED:
                yield adapters


def _is_float32(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer of an adapter is a product in float32, without a bias."""
    return type(layer) is nn.Linear and layer.bias is None and layer.weight.dtype == torch.float32


def _float32_layers(policy: Policy) -> list[nn.Linear]:
    """Return the linear layers with float32 weights that a decoding step uses, without the reference's adapter."""
    named = (
        *policy.family.language_model(policy.model).named_modules(),
        ("head", policy.model.get_output_embeddings()),
    )
    return [
        module
        for name, module in named
        if type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and not name.endswith(f".{REFERENCE}")
        and "forward" not in module.__dict__  # otherwise another library has replaced it
    ]
