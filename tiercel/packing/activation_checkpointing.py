"""Recomputation of the decoder's layers in the backward pass, to save memory.

`full` keeps the input of each layer. `selective` also keeps what is expensive to compute but small to store: the
attention, and every second one of the largest matrix products. Shape suffixes: docs/shapes.md.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tiercel.config.schema import Checkpointing
from tiercel.models.layers.attention import Attend, Layer

LARGE_SHARE = 0.5  # of hidden size x MLP size: a weight with as many numbers is large; those of attention have fewer
_PRODUCTS = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}  # the place of the right factor


def checkpoint_layers(model: Any, config: Any, kind: Checkpointing) -> None:
    """Make each decoder layer recompute its activations in training. `config` is the decoder's."""
    if not kind:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        least = round(LARGE_SHARE * config.hidden_size * config.intermediate_size)
        options["context_fn"] = lambda: kept_products(least)
    # transformers renamed it after the lowest version that tiercel supports.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    # For reentrant checkpointing, transformers makes all embeddings require a gradient, including those of a frozen
    # vision tower. That is not needed here, and no backward pass may run through the tower.
    model.disable_input_require_grads()


def kept_products(least: int) -> tuple["_Products", "_Products"]:
    """Build the contexts of a layer's forward pass and of its recomputation, which reuses every second product by a
    matrix of at least `least` numbers. PyTorch's own contexts need each operation of the recomputation to have occurred
    in the forward pass, but FSDP2 and DeepSpeed gather weights in only one of them."""
    kept: deque[Tensor] = deque()
    return _Products(least, kept, is_again=False), _Products(least, kept, is_again=True)


class _Products(TorchDispatchMode):
    def __init__(self, least: int, kept: deque[Tensor], *, is_again: bool):
        super().__init__()
        self.least = least
        self.kept = kept
        self.is_again = is_again
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow torch.compile inside; compiled operations are not seen here."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_large = func in _PRODUCTS and args[_PRODUCTS[func]].numel() >= self.least
        self.count += is_large
        is_kept = is_large and self.count % 2 == 1
        if is_kept and self.is_again:
            return self.kept.popleft()
        result = func(*args, **(kwargs or {}))
        if is_kept:
            self.kept.append(result.detach())  # the result itself would hold its graph
        return result


class SavedAttention:
    """The attention `attend`, computed once for each layer; the recomputation gets the kept output."""

    def __init__(self, attend: Attend):
        self.attend = attend
        self.outputs: dict[int, Tensor] = {}

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.attend(layer, query_BATE, key_BJTE, value_BJTE)
        if layer.index in self.outputs:
            return self.outputs.pop(layer.index)
        output_BATE = _Apart.apply(query_BATE, key_BJTE, value_BJTE, self.attend, layer)
        self.outputs[layer.index] = output_BATE.detach().requires_grad_(output_BATE.requires_grad)
        return output_BATE


class _Apart(torch.autograd.Function):
    """An attention with a graph of its own, whose tensors the checkpoint around it neither drops nor expects."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attend: Attend, layer: Layer) -> Tensor:
        inputs = [tensor.detach() for tensor in (query, key, value)]
        for tensor, is_needed in zip(inputs, ctx.needs_input_grad, strict=False):
            tensor.requires_grad_(is_needed)
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            output = attend(layer, inputs[0], inputs[1], inputs[2])
        ctx.inputs, ctx.output = inputs, output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(ctx.output, needed, gradients[0]))
        results = [next(found) if tensor.requires_grad else None for tensor in ctx.inputs]
        del ctx.inputs, ctx.output
        return *results, None, None
