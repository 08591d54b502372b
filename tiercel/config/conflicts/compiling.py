"""Decide which recipes allow compiled decoder layers (`learner.compile`)."""

from dataclasses import dataclass

from tiercel.config.schema import BaseRecipe
from tiercel.config.strategies import StrategyKind


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileObstacle:
    """The reason why layers cannot be compiled."""

    key: str
    given: str  # the key and its value
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.given}, {self.reason}; set {self.remedy}, or learner.compile: auto"


def compile_obstacle(recipe: BaseRecipe, strategy: StrategyKind | None) -> CompileObstacle | None:
    """Find what keeps the layers from being compiled; None if nothing does. `strategy` is None if the run chooses
    it."""
    if strategy is not None and strategy.shards_model:
        return CompileObstacle(
            key="train.strategy",
            given=f"train.strategy {strategy.name}",
            reason="whose ranks gather weights around parts of a layer",
            remedy="train.strategy: single or ddp",
        )
    if recipe.model.quantize is not None:
        return CompileObstacle(
            key="model.quantize",
            given=f"model.quantize {recipe.model.quantize}",
            reason="whose matrix products are computed by bitsandbytes and would split compiled layers into pieces",
            remedy="model.quantize: null",
        )
    if recipe.learner.gradient_checkpointing == "selective":
        return CompileObstacle(
            key="learner.gradient_checkpointing",
            given="learner.gradient_checkpointing selective",
            reason="which cannot see the matrix products inside compiled layers, and would compute all of them again",
            remedy="learner.gradient_checkpointing: full or false",
        )
    if recipe.lora is not None and recipe.lora.kind == "dora":
        return CompileObstacle(
            key="lora.kind",
            given="lora.kind dora",
            reason="which computes the norms of a weight's rows in each pass",
            remedy="lora.kind: lora or rslora",
        )
    if recipe.lora is not None and recipe.lora.dropout > 0:
        return CompileObstacle(
            key="lora.dropout",
            given=f"lora.dropout {recipe.lora.dropout:g}",
            reason="and compiled layers would draw other random numbers",
            remedy="lora.dropout: 0",
        )
    return None
