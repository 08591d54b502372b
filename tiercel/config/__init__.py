"""Read, check and write recipes. Imports no torch."""

from tiercel.config.loading import detect_kind, flatten, load_recipe, recipe_to_yaml
from tiercel.config.schema import (
    BaseRecipe,
    DistillRecipe,
    DpoRecipe,
    GrpoRecipe,
    Kind,
    KtoRecipe,
    OfflineRecipe,
    Recipe,
    RewardRecipe,
    SftRecipe,
)

__all__ = [
    "BaseRecipe",
    "DistillRecipe",
    "DpoRecipe",
    "GrpoRecipe",
    "Kind",
    "KtoRecipe",
    "OfflineRecipe",
    "Recipe",
    "RewardRecipe",
    "SftRecipe",
    "detect_kind",
    "flatten",
    "load_recipe",
    "recipe_to_yaml",
]
