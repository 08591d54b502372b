"""Copy float32 weights in the dtype that autocast computes in, once for a rollout.

Autocast casts each float32 weight at each use. A captured step would repeat that at every token: for an adapter some
hundred small kernels, for a model that is trained whole all of its weights. The numbers are the same, because a product
casts to the same dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tiercel.models.policy import REFERENCE, Policy
from tiercel.rollout.prepacking import replaced


class NarrowLinears:
    """Holds the copies of the decoder's linear layers and of the head. They stay where they are from rollout to
    rollout, because captured steps read them."""

    def __init__(self, policy: Policy):
        self.dtype = policy.compute_dtype
        self.layers = _float32_layers(policy) if policy.needs_autocast else []
        self.copies: dict[nn.Linear, tuple[Tensor, Tensor | None]] = {}

    @contextmanager
    def of_present_weights(self) -> Iterator[None]:
        """Copy the present weights, for `in_place`."""
        for layer in self.layers:
            if layer not in self.copies:
                bias = None if layer.bias is None else self._empty_like(layer.bias)
                self.copies[layer] = self._empty_like(layer.weight), bias
            for copy, weight in zip(self.copies[layer], (layer.weight, layer.bias), strict=True):
                if copy is not None:
                    copy.copy_(weight)
        yield

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the layers compute with their copies, without gradient."""
        with replaced({layer: partial(_product, *copies) for layer, copies in self.copies.items()}):
            yield

    @property
    def held_bytes(self) -> int:
        return sum(copy.nbytes for copies in self.copies.values() for copy in copies if copy is not None)

    def release(self) -> None:
        self.copies.clear()

    def _empty_like(self, weight: Tensor) -> Tensor:
        return torch.empty_like(weight, dtype=self.dtype, requires_grad=False)


def _product(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return linear(inputs, weight, bias)


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
