"""docs/algorithms.md is what the dicts say."""

from pathlib import Path

import pytest

from tiercel.algorithms import ADVANTAGES, KL_ESTIMATORS, LOSSES
from tiercel.algorithms.catalogue import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_document_is_up_to_date():
    """Mended by: make docs."""
    assert DOCUMENT.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize("entries", (LOSSES, ADVANTAGES, KL_ESTIMATORS), ids=("losses", "advantages", "kl"))
def test_every_entry_has_a_row_with_formula_source_and_use(entries):
    text = render()
    for name, entry in entries.items():
        assert f"| `{name}` |" in text
        assert entry.formula and entry.source and entry.use
