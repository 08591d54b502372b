"""docs/families.md lists every family, names tests that exist, and its example is as short as it says."""

import importlib
import re
from inspect import isabstract
from pathlib import Path
from pkgutil import iter_modules

from tiercel.models import families
from tiercel.models.families.base import Family
from tiercel.models.families.loading import FAMILIES, PROVED
from tools.docs.families import tables
from tools.docs.tables import with_table

ROOT = Path(__file__).parents[2]


def test_the_document_is_up_to_date():
    """Mended by: make docs."""
    document = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    for name, table in tables().items():
        assert with_table(document, name, table) == document


def test_every_family_has_a_row_in_words_of_its_own():
    names = [each.name for each in iter_modules(families.__path__)]
    modules = [importlib.import_module(f"tiercel.models.families.{name}") for name in names]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    concrete = {each for each in classes if issubclass(each, Family) and not isabstract(each)}
    assert concrete == {*FAMILIES.values(), *PROVED}
    assert [family.name for family in FAMILIES.values()] == list(FAMILIES)
    for family in concrete:
        assert f"| `{family.name}` | {family.serves} |" in tables()["families"]
        assert "serves" in vars(family) and vars(family).get("special"), family.name


def test_the_tests_that_the_document_names_are_there():
    names = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "families.md").read_text(encoding="utf-8")))
    text = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "models").glob("test_*.py"))
    assert len(names) > 10 and names <= set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))


def test_the_example_of_a_family_is_short():
    lines = (ROOT / "tiercel" / "models" / "families" / "llava_onevision.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
