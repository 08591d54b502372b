"""Tell which parts of the model a recipe trains, by an adapter or whole."""

from typing import get_args

from tiercel.config.schema import BaseRecipe, Part

PARTS: tuple[Part, ...] = get_args(Part)


def whole_parts(recipe: BaseRecipe) -> tuple[Part, ...]:
    """List the parts whose own weights are trained. With an adapter, those of the language model are not."""
    return tuple(part for part in PARTS if part not in recipe.freeze and (recipe.lora is None or part != "language"))


def adapted_parts(recipe: BaseRecipe) -> tuple[Part, ...] | None:
    """List the parts that get an adapter; None if a regular expression decides it, because that needs the model."""
    if recipe.lora is None:
        return ()
    if recipe.lora.targets == "all":
        return PARTS
    return tuple(part for part in PARTS if part == recipe.lora.targets) or None


def keeps_start(recipe: BaseRecipe) -> bool:
    """Return whether the reference needs a frozen copy of weights, because a part is trained whole: an adapter could
    simply be switched off."""
    return recipe.needs_reference and bool(whole_parts(recipe))
