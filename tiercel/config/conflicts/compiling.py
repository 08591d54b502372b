"""Decide which recipes allow compiled decoder layers (`learner.compile`)."""

from dataclasses import dataclass

from tiercel.config.schema import BaseRecipe
from tiercel.config.strategies import StrategyKind
from tiercel.tables import table_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileObstacle:
    """The key and the value that keep layers from being compiled."""

    key: str
    value: str

    @property
    def given(self) -> str:
        return f"{self.key} {self.value}"

    def __str__(self) -> str:
        rows = table_rows("tiercel.config.conflicts", "compiling.txt")
        reason, remedy = next(texts for key, *texts in rows if key == self.key)
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
