"""Every recipe in recipes/ is valid, whatever data it names."""

from pathlib import Path

import pytest

from tiercel.config import detect_kind, load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid(path: Path):
    kind = detect_kind(path)
    recipe = load_recipe(kind, path, check_paths=False)
    assert recipe.output.startswith("runs/")
    assert kind in path.stem.split("-") or (path.stem, kind) == ("zoom-demo", "grpo")


def test_recipes_are_there():
    assert {"rec-3b-grpo", "qwen2vl-sft-multi-gpu"} <= {path.stem for path in RECIPES}
