"""docs/algorithms.md corresponds to the tables."""

from pathlib import Path

import pytest

from tiercel.algorithms import ADVANTAGES, KL_ESTIMATORS, LOSSES
from tiercel.algorithms.losses import NORMALISERS
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.surrogates import SURROGATES
from tools.docs.algorithms import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_document_is_up_to_date():
    """Mended by: make docs."""
    assert DOCUMENT.read_text(encoding="utf-8") == render()


@pytest.mark.parametrize(
    "entries",
    (LOSSES, RATIOS, SURROGATES, NORMALISERS, ADVANTAGES, KL_ESTIMATORS),
    ids=("losses", "ratios", "surrogates", "normalisers", "advantages", "kl"),
)
def test_every_entry_has_a_row_with_formula_source_and_use(entries):
    text = render()
    for name, entry in entries.items():
        assert f"| `{name}` |" in text
        assert entry.formula and entry.source and entry.use


def test_every_key_around_the_loss_is_explained():
    table = render().partition("## Around the loss")[2].partition("\n## ")[0]
    cells = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| `")]
    assert len(cells) > 10 and all(cells)
