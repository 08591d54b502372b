"""docs/recipe.md is made from the schema."""

from pathlib import Path

from tiercel.config.keys import keys_of
from tiercel.config.schema import GrpoRecipe, SftRecipe
from tiercel.config.yaml_text import parse
from tools.docs.recipe import HEADER, render_reference

ROOT = Path(__file__).parents[2]


def test_the_document_is_current():
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert text == render_reference(), "run: make docs"


def test_every_key_has_a_meaning():
    bare = [key.path for key in keys_of("grpo").values() if key.section is None and not key.meaning]
    assert bare == []


def test_the_examples_in_the_introduction_are_valid():
    sft, grpo = (block.split("```")[0] for block in HEADER.split("```yaml\n")[1:])
    assert SftRecipe.model_validate(parse(sft)[0]).train.epochs == 1
    assert [reward.name for reward in GrpoRecipe.model_validate(parse(grpo)[0]).rewards] == ["exact", "format"]
