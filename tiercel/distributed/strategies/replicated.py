"""Implement the strategies in which every rank has all weights. Gradients are summed by all_reduce of flat buffers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.strategies.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from tiercel.distributed.strategies.shard_files import SavedTensors
from tiercel.models.policy import Policy

FIRST_LOSS_SCALE = 2.0**16
BUFFER_ELEMENTS = 2**28  # the largest flat gradient buffer; one is enough for adapters, full fine-tuning needs several


class Replicated:
    """Implements `single` and `ddp`."""

    passes_are_private = True

    def __init__(
        self, recipe: BaseRecipe, ranks: Ranks, policy: Policy, learner: Any, start: Mapping[str, Tensor] | None = None
    ):
        self.ranks = ranks
        self.policy = policy
        self.learner = learner
        self.parameters = policy.trained_parameters()
        place = policy.device if recipe.model.reference == "device" else torch.device("cpu")
        self.start = {name: self._share(self.parameters[name], each).to(place) for name, each in (start or {}).items()}
        self.optimizer = build_optimizer(policy, recipe.optim)
        is_half = policy.compute_dtype == torch.float16
        self.scaler = torch.amp.GradScaler(policy.device.type, init_scale=FIRST_LOSS_SCALE, enabled=is_half)
        self.scaler.scale(torch.zeros((), device=policy.device))  # for updates without a backward pass too

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self.optimizer, rate)

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def discard_gradients(self) -> None:
        self.zero_gradients()
        if self.scaler.is_enabled():
            self.scaler.update(self.scaler.get_scale())  # so that the next update starts without this one's state

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.scaler.scale(loss).backward()

    def reduce_gradients(self) -> float:
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.ranks.world_size > 1:
            sum_over_ranks(self.ranks, [p.grad for p in self.parameters.values() if p.grad is not None])
        self.scaler.unscale_(self.optimizer)
        return float(gradient_norm(self.parameters))

    def gradients(self) -> dict[str, Tensor]:
        return self._on_first({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    def update(self, norm: float, max_norm: float) -> bool:
        is_finite = math.isfinite(norm)
        if is_finite:
            clip_gradients(self.parameters, norm, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return is_finite

    @property
    def loss_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler.is_enabled() else 1.0

    def trained_weights(self) -> dict[str, Tensor]:
        return self._on_first(self.parameters)

    def model_weights(self) -> dict[str, Tensor]:
        return self._on_first(saved_tensors(self.policy.model))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        return self._on_first(optimizer_tensors(self.optimizer, self.parameters))

    def scaler_state(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def restore(self, tensors: SavedTensors, scaler_state: Mapping[str, Any]) -> None:
        restore_optimizer(self.optimizer, self.parameters, tensors)
        self.scaler.load_state_dict(dict(scaler_state))

    @contextmanager
    def moved(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(change(parameter))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[name])

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        own = {name: self.parameters[name].data for name in self.start}
        try:
            for name, weight in self.start.items():
                self.parameters[name].data = weight.to(self.policy.device)
            with self.policy.as_reference():
                yield
        finally:
            for name, weight in own.items():
                self.parameters[name].data = weight

    @contextmanager
    def whole_policy(self) -> Iterator[None]:
        yield

    def _share(self, parameter: nn.Parameter, weight: Tensor) -> Tensor:
        """Return this rank's part of a whole weight."""
        return weight

    def _on_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy whole tensors to the CPU of the first rank, one at a time; empty on the other ranks."""
        kept = {}
        for name, tensor in tensors.items():
            whole = self._whole(tensor.detach())
            if self.ranks.is_first:
                kept[name] = whole.cpu().contiguous()
        return kept

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, a tied one only once, and the buffers that a checkpoint has."""
    names = set(model.state_dict())
    parameters = dict(model.named_parameters())
    return {**parameters, **{name: buffer for name, buffer in model.named_buffers() if name in names}}


def sum_over_ranks(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Sum tensors over ranks in place, in their order, in flat buffers."""
    for bunch in _bunches(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bunch])
        ranks.all_reduce(flat, "gradients")
        pieces = flat.split([tensor.numel() for tensor in bunch])
        for tensor, piece in zip(bunch, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def _bunches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bunch: list[Tensor] = []
    held = 0
    for tensor in tensors:
        if bunch and held + tensor.numel() > BUFFER_ELEMENTS:
            yield bunch
            bunch, held = [], 0
        bunch.append(tensor)
        held += tensor.numel()
    if bunch:
        yield bunch
