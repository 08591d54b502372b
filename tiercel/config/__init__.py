"""Recipes: read, judged and written. Imports no torch."""

from tiercel.config.keys import Kind
from tiercel.config.loading import detect_kind, flatten, load_recipe, recipe_to_yaml
from tiercel.config.schema import BaseRecipe, GrpoRecipe, SftRecipe

__all__ = [
    "BaseRecipe",
    "GrpoRecipe",
    "Kind",
    "SftRecipe",
    "detect_kind",
    "flatten",
    "load_recipe",
    "recipe_to_yaml",
]
