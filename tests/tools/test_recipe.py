"""docs/recipe.md is generated from the schema."""

from pathlib import Path

from tiercel.config.keys import OWN_SECTIONS, RECIPES, keys_of
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


def test_the_introduction_has_every_verb_and_the_sections_that_tell_it():
    missing = [kind for kind in RECIPES if f"    tiercel {kind} " not in HEADER]
    told = HEADER[HEADER.index("The sections of a recipe") :]
    missing += [name for kind, own in OWN_SECTIONS.items() for name in own if f"`{name}`" not in told]
    assert missing == []


def test_a_section_says_for_which_verbs_it_is_required():
    text = render_reference()
    sections = {part.split("`")[0]: part for part in text.split("\n## `")[1:]}
    assert "Required for `tiercel grpo`." in sections["rewards"]
    assert "Required." in sections["ranking"] and "Required" not in sections["rollout"]


def test_the_examples_in_the_introduction_are_valid():
    sft, grpo = (block.split("```")[0] for block in HEADER.split("```yaml\n")[1:])
    assert SftRecipe.model_validate(parse(sft)[0]).train.epochs == 1
    assert [reward.name for reward in GrpoRecipe.model_validate(parse(grpo)[0]).rewards] == ["exact", "format"]
