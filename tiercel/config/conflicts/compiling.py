"""Decide which recipes allow compiled decoder layers (`learner.compile`)."""

from dataclasses import dataclass

from tiercel.config.schema import BaseRecipe
from tiercel.config.strategies import StrategyKind

# By the key that is in the way: the reason, and what to set.
_REASONS = {
    "train.strategy": ("whose ranks gather weights around parts of a layer", "train.strategy: single or ddp"),
    "model.quantize": (
        "whose matrix products are computed by bitsandbytes and would split compiled layers into pieces",
        "model.quantize: null",
    ),
    "learner.gradient_checkpointing": (
        "which cannot see the matrix products inside compiled layers, and would compute all of them again",
        "learner.gradient_checkpointing: full or false",
    ),
    "lora.kind": ("which computes the norms of a weight's rows in each pass", "lora.kind: lora or rslora"),
    "lora.dropout": ("and compiled layers would draw other random numbers", "lora.dropout: 0"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileObstacle:
    """The key and the value that keep layers from being compiled."""

    key: str
    value: str

    @property
    def given(self) -> str:
        return f"{self.key} {self.value}"

    def __str__(self) -> str:
        reason, remedy = _REASONS[self.key]
        return f"{self.given}, {reason}; set {remedy}, or learner.compile: auto"


def compile_obstacle(recipe: BaseRecipe, strategy: StrategyKind | None) -> CompileObstacle | None:
    """Find what keeps the layers from being compiled; None if nothing does. `strategy` is None if the run chooses
    it."""
    lora, checkpointing = recipe.lora, recipe.learner.gradient_checkpointing
    found: dict[str, str | None] = {
        "train.strategy": strategy.name if strategy is not None and strategy.shards_model else None,
        "model.quantize": recipe.model.quantize,
        "learner.gradient_checkpointing": "selective" if checkpointing == "selective" else None,
        "lora.kind": "dora" if lora is not None and lora.kind == "dora" else None,
        "lora.dropout": f"{lora.dropout:g}" if lora is not None and lora.dropout > 0 else None,
    }
    return next((CompileObstacle(key=key, value=value) for key, value in found.items() if value is not None), None)
