"""Mixtures of experts: in each layer a router chooses, for every token, the experts that compute it.

transformers holds the experts of a layer as two parameters of three dimensions, and computes them by `IMPLEMENTATION`:
tokens are sorted by expert and go through one grouped product. It never waits for the device to count tokens, and it
adds up the experts of a token in a fixed order. Shape suffixes: docs/shapes.md. X are the experts of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IMPLEMENTATION = "grouped_mm"  # its name in transformers
METRICS = "experts/"  # the names of the metrics begin so
_GATES = ("gate", "shared_expert_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """The experts of one layer, before or after an adapter is added."""

    name: str  # of the block in the model that was asked
    block: Any  # has `experts` and `gate`, the router

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """Return the names of the experts' weights. Call it on a model without an adapter."""
        return tuple(f"{self.name}.experts.{name}" for name, _ in self.block.experts.named_parameters())


def is_mixture(module: nn.Module) -> bool:
    """Tell whether a module is a router with its experts."""
    return hasattr(module, "experts") and hasattr(module, "gate")


def mixtures(model: nn.Module) -> list[Mixture]:
    """List the mixtures of a model, in the order of its layers; none where it has no experts."""
    return [Mixture(name=name, block=module) for name, module in model.named_modules() if is_mixture(module)]


def gate_names(model: nn.Module) -> set[str]:
    """Return the names of the modules that choose or weigh experts. tiercel does not train them."""
    return {f"{mixture.name}.{gate}" for mixture in mixtures(model) for gate in _GATES if hasattr(mixture.block, gate)}


class ExpertLoad:
    """Counts the tokens that each expert computes in passes with a gradient. Nothing waits for the device."""

    def __init__(self, language_model: nn.Module):
        self.routers = [mixture.block.gate for mixture in mixtures(language_model)]
        self._counts: dict[int, Tensor] = {}  # int64 (X,), by layer

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside. A layer that is computed again in the backward pass is outside, and is not counted twice."""
        if not (self.routers and torch.is_grad_enabled()):
            yield
            return
        hooks = [router.register_forward_hook(self._counter(layer)) for layer, router in enumerate(self.routers)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> dict[str, Tensor]:
        """Return the load of the busiest and of the least busy expert, as a multiple of an even share, and the share of
        experts that got no token: means over the layers. Empty without experts. Then begin to count anew."""
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

    def _counter(self, layer: int) -> Any:
        def count(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen = output[2].flatten()
            counts_X = self._counts.get(layer)
            if counts_X is None:
                counts_X = torch.zeros(router.num_experts, dtype=torch.int64, device=chosen.device)
            self._counts[layer] = counts_X.scatter_add(0, chosen, torch.ones_like(chosen))

        return count
