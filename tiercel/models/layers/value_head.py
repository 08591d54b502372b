"""The value head of a reward model: one number for each state. It is part of the model and saved next to its other
weights.

Shape suffixes: docs/shapes.md.
"""

import torch
from torch import Tensor, nn

from tiercel.models.families.base import HuggingFaceModel

NAME = "value_head"


class ValueHead(nn.Module):
    """The head that computes h . w in float32. It starts at 0, so that all answers are equal before training. It is not
    an nn.Linear, which an adapter might change."""

    def __init__(self, hidden_size: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=torch.float32, device=device), requires_grad=False)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Compute the values (N,)."""
        return hidden_NH.float() @ self.weight.float()


def add_value_head(model: HuggingFaceModel) -> None:
    """Add a value head to a model."""
    embedding = model.get_input_embeddings().weight
    setattr(model, NAME, ValueHead(model.get_output_embeddings().weight.shape[1], embedding.device))


def value_head(model: HuggingFaceModel) -> ValueHead | None:
    """Return a model's value head, or None if it has none."""
    return getattr(model, NAME, None)
