"""docs/data.md lists every format, and its examples are rows and recipes that are read as it says."""

import json
import re
from pathlib import Path

import pytest

from tiercel.config.schema import Data
from tiercel.config.yaml_text import parse
from tiercel.data.formats.registry import FORMATS, detect_format, rows_of
from tiercel.data.order import RowOrder
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.types import ImageRoots, Row
from tools.docs.data import TABLE, table
from tools.docs.tables import with_table

DOCUMENT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
# The format is that of the nearest heading above, if that names one.
EXAMPLES = [
    (next(iter(re.findall(r"^### `(\w+)`$", section, re.MULTILINE)), "tiercel"), json.loads(block))
    for section in re.split(r"^(?=##)", DOCUMENT, flags=re.MULTILINE)
    for block in re.findall(r"^```json\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]


def test_the_document_is_up_to_date():
    """Mended by: make docs."""
    assert with_table(DOCUMENT, TABLE, table()) == DOCUMENT


def test_every_format_has_a_row_and_an_example():
    assert set(FORMATS) == {name for name, _ in EXAMPLES}
    for name in FORMATS:
        assert f"| `{name}` | " in table()


@pytest.mark.parametrize(("name", "record"), EXAMPLES)
def test_an_example_is_told_by_its_keys_and_accepted(name, record):
    # Bare messages with a label may belong to either, and are read the same way.
    assert detect_format([record], "rows.jsonl") == ("swift" if "label" in record else name)
    kept = {"rejected": "pairs", "label": "labels"}
    own = next((purpose for key, purpose in kept.items() if key in record), None)
    for purpose in (own,) if own else ("grpo", "sft"):
        reading = Reading(
            file="rows.jsonl",
            purpose=purpose,
            image_roots=ImageRoots(),
            image_size=lambda source: (640, 480),
            prompt="Where is {prompt}?" if name == "refcoco" else None,
        )
        rows = rows_of(Record(line=1, value=record), name, reading)
        if purpose == "sft" and name == "tiercel" and "answer" in record:
            assert [row.reason for row in rows] == ["there is no assistant turn to train on"]
            continue
        assert rows and all(isinstance(row, Row) and len(row.images) == 1 for row in rows), rows
        if own is None and "loss" not in str(record):
            assert all(row.answer is not None for row in rows)


def test_the_recipes_data_sections_are_read():
    blocks = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    found = [Data.model_validate(parse(block)[0]["data"]) for block in blocks]
    mixed = next(data for data in found if data.mix)
    weights = (1.0, *(more.weight for more in mixed.mix))
    order = RowOrder(counts=(4000, 1000, 2000), weights=weights, seed=0, shuffle=True)
    assert order.shares == (4000, 2000, 1000) and order.row_count == 7000
