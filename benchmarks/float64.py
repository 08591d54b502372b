"""A model that computes in float64 alone, as the reference of every other precision.

transformers' norms, rotary embeddings, routers, some softmaxes and the rule of delta nets ask for float32 whatever the
model's dtype is, and so do sums in tiercel's head. A reference that rounds there is no better than 1e-6.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.tiny_models import tiny_policy
from tiercel.models.layers.experts import mixtures
from tiercel.models.policy import Policy


def in_float64(policy: Policy, checkpoint: Path) -> Policy:
    """Return a policy with the same weights in float64. `checkpoint` is that of the base model."""
    double = tiny_policy(checkpoint, dtype="float32")
    double = replace(double, model=double.model.double(), compute_dtype=torch.float64)
    if mixtures(double.model):
        double.model.set_experts_implementation("eager")  # grouped products do not support float64
    double.model.load_state_dict(policy.model.state_dict())
    return double


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Make whatever asks for float32 get float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64ForFloat32():
            yield
    finally:
        torch.set_default_dtype(before)


class _Float64ForFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.float:
            return args[0].double()
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
