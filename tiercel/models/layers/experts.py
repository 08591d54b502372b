"""Mixtures of experts. In each layer a router chooses, for every token, the experts that compute it.

transformers holds the experts of a layer as two parameters of three dimensions, and computes them with
`IMPLEMENTATION`: tokens are sorted by expert and go through one grouped product. It never waits for the device to count
tokens, and it adds up a token's experts in a fixed order. Shape suffixes: docs/shapes.md. X is the number of experts in
a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IMPLEMENTATION = "grouped_mm"  # its name in transformers
METRICS = "experts/"  # the prefix of the metrics' names
_ROUTERS = ("gate", "router")  # a block has one of the two
_GATES = (*_ROUTERS, "shared_expert_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """The experts of one layer, before or after an adapter is added."""

    name: str  # of the block in the model
    block: Any  # has `experts`, and one of _ROUTERS

    @property
    def router(self) -> Any:
        """Return the module that chooses experts."""
        return next(getattr(self.block, name) for name in _ROUTERS if hasattr(self.block, name))

    @property
    def experts(self) -> Any:
        """Return the module of the experts without its adapter."""
        experts = self.block.experts
        return experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts

    @property
    def count(self) -> int:
        """Return the number of experts. Gemma 4's router does not say it."""
        return int(getattr(self.router, "num_experts", None) or self.experts.num_experts)

    @property
    def uses_kernels(self) -> bool:
        """Return whether transformers computes these experts with a selectable implementation."""
        return hasattr(self.experts, "_apply_gate")

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """Return the names of the experts' weights. Call it on a model without an adapter."""
        return tuple(f"{self.name}.experts.{name}" for name, _ in self.block.experts.named_parameters())


def experts_of_a_token(config: Any) -> int:
    """Return how many experts compute each token. `config` is the decoder's."""
    return int(getattr(config, "num_experts_per_tok", None) or config.top_k_experts)


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module is a router with its experts."""
    return hasattr(module, "experts") and any(hasattr(module, name) for name in _ROUTERS)


def mixtures(model: nn.Module) -> list[ExpertLayer]:
    """Return the mixtures of a model, in the order of its layers; the list is empty if it has no experts."""
    return [ExpertLayer(name=name, block=module) for name, module in model.named_modules() if is_mixture(module)]


def gate_names(model: nn.Module) -> set[str]:
    """Return the names of the modules that choose or weight experts, which tiercel does not train."""
    gates = [
        (f"{mixture.name}.{gate}", getattr(mixture.block, gate))
        for mixture in mixtures(model)
        for gate in _GATES
        if hasattr(mixture.block, gate)
    ]
    return {name for prefix, gate in gates for name, _ in gate.named_modules(prefix=prefix)}


class ExpertLoad:
    """A counter of the tokens that each expert computes in passes with a gradient. It never waits for the device."""

    def __init__(self, language_model: nn.Module):
        self.mixtures = [mixture for mixture in mixtures(language_model) if mixture.uses_kernels]
        self._counts: dict[int, Tensor] = {}  # int64 (X,), by layer

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the context. Layers are recomputed in the backward pass outside of it, so they are not counted
        twice."""
        if not (self.mixtures and torch.is_grad_enabled()):
            yield
            return
        hooks = [
            mixture.block.experts.register_forward_pre_hook(self._counter(layer, mixture.count))
            for layer, mixture in enumerate(self.mixtures)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> dict[str, Tensor]:
        """Return the load of the busiest and of the least busy expert, as a multiple of an even share, and the share of
        experts without tokens, averaged over the layers, and reset the counts. Empty without experts."""
        if not self._counts:
            return {}
        counts_LX = torch.stack(list(self._counts.values())).float()
        self._counts = {}
        loads_LX = counts_LX / counts_LX.mean(dim=1, keepdim=True)
        return {
            f"{METRICS}load_max": loads_LX.amax(dim=1).mean(),
            f"{METRICS}load_min": loads_LX.amin(dim=1).mean(),
            f"{METRICS}unused_fraction": (counts_LX == 0).float().mean(),
        }

    def _counter(self, layer: int, experts: int) -> Any:
        def count(module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen = inputs[1].flatten()  # states, each state's experts, and the experts' weights
            counts_X = self._counts.get(layer)
            if counts_X is None:
                counts_X = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
            self._counts[layer] = counts_X.scatter_add(0, chosen, torch.ones_like(chosen))

        return count
