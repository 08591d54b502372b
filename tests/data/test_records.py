"""Lines of JSON as records."""

import json
import random

import pytest

from tiercel.data.formats.columns import foreign_columns, require_plain
from tiercel.data.records import DEEPEST, record_of_json
from tiercel.errors import DataError

TEXTS = ("", "plain", "ü", "\ud800", "😀", '"[{\\', "\\ud800", "\u2028")


def value(draw: random.Random, levels: int) -> object:
    """A random value of JSON."""
    kind = draw.randrange(6)
    if levels == 0 or kind < 3:
        return draw.choice([None, True, 3, 2.5, *TEXTS])
    if kind == 3:
        return [value(draw, levels - 1) for _ in range(draw.randrange(3))]
    return {draw.choice(TEXTS): value(draw, levels - 1) for _ in range(draw.randrange(3))}


def test_a_line_that_is_taken_to_be_plain_holds_nothing_that_is_refused():
    draw, plain = random.Random(0), 0
    for _ in range(2000):
        data = json.dumps({"row": value(draw, 4)}, ensure_ascii=draw.random() < 0.5).encode(errors="ignore")
        record = record_of_json(data, 1)
        if record.is_plain:
            require_plain(record.value)
            assert foreign_columns(record.value, ()) == {}
            plain += 1
    assert 500 < plain < 1900


@pytest.mark.parametrize(
    ("line", "is_plain"),
    [
        (b'{"a": "b"}', True),
        (b'{"a": "\xf0\x9f\x98\x80"}', True),
        (b'{"a": "\\ud83d\\ude00"}', False),  # an escape, though of a whole pair
        (b'{"a": "\\\\ud800"}', False),  # text of JSON may hold the escape itself
        (b'{"a": ' + b"[" * (DEEPEST - 1) + b"]" * (DEEPEST - 1) + b"}", True),
        (b'{"a": ' + b"[" * DEEPEST + b"]" * DEEPEST + b"}", False),
    ],
)
def test_a_line_with_an_escape_or_many_levels_is_looked_at(line, is_plain):
    assert record_of_json(line, 1).is_plain == is_plain


def test_half_of_a_pair_is_refused():
    record = record_of_json(b'{"a": "\\ud800"}', 1)
    assert not record.is_plain
    with pytest.raises(DataError):
        require_plain(record.value)
