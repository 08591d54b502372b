"""Muon for the matrices of a model's layers, and AdamW for all else, as one optimiser.

Muon makes the momentum of a matrix nearly orthogonal before it is applied (Jordan et al. 2024). Its step is scaled to
the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that one learning rate and one weight decay serve both.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from tiercel.models.families.base import HuggingFaceModel

STEP_LIKE_ADAMW = "match_rms_adamw"  # torch's name of the scaling


def layer_matrices(model: HuggingFaceModel) -> frozenset[str]:
    """Return the names of the matrices that Muon updates: those of linear layers in a list of blocks, of decoder and
    vision tower. Embeddings, the head, a patch embedding and stacked experts are not among them."""
    found = set[str]()
    for name, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList):
            inside = (f"{name}.{own}.weight" for own, module in blocks.named_modules() if isinstance(module, nn.Linear))
            found.update(inside)
    return frozenset(found)


class MuonAndAdamW(torch.optim.Optimizer):
    """Both optimisers with one list of groups and one state, which are theirs."""

    def __init__(
        self,
        of_muon: Collection[dict[str, Any]],
        of_adamw: Collection[dict[str, Any]],
        *,
        momentum: float,
        **adamw: Any,
    ):
        """`adamw`: the arguments of AdamW, of which Muon has the learning rate too."""
        parts: list[torch.optim.Optimizer] = []
        if of_muon:
            parts.append(torch.optim.Muon(of_muon, lr=adamw["lr"], momentum=momentum, adjust_lr_fn=STEP_LIKE_ADAMW))
        if of_adamw:
            parts.append(torch.optim.AdamW(of_adamw, **adamw))
        super().__init__([group for part in parts for group in part.param_groups], {"fused": adamw["fused"]})
        self.parts = tuple(parts)
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for part in self.parts:
            part.step()
