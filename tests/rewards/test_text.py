"""Rewards for text, numbers and JSON against values worked by hand."""

import json

import pytest

from tests.rewards.samples import reward, sample
from tiercel.errors import DataError
from tiercel.rewards.text import normalised


def value(name: str, completion: str, truth=None, **options) -> float | None:
    return reward(name=name, **options).score(sample(completion, truth))


def test_exact_takes_one_of_several_texts():
    assert value("exact", "dog", ["dog", "hound"]) == 1.0
    assert value("exact", "hound", ["dog", "hound"]) == 1.0
    assert value("exact", "cat", ["dog", "hound"]) == 0.0
    with pytest.raises(DataError, match="number or a list of them"):
        value("exact", "cat", [])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("The Dog.", "dog"),
        ("  a   red,ball ", "Red ball"),
        ("CAF\u00c9!", "cafe\u0301"),
        ("\uff11\uff12", "12"),
        ("stra\u00dfe", "STRASSE"),
        ("it's", "it s"),
        ("a.", "A"),
        (" % ", "%"),
    ],
)
def test_normalised_texts_are_equal(given, wanted):
    assert value("normalised", given, wanted) == 1.0


def test_normalised_texts_that_differ():
    assert value("normalised", "dogs", "dog") == 0.0
    assert value("normalised", "theatre", "atre") == 0.0  # an article is a word
    assert value("normalised", "the", "A") == value("normalised", "", "A") == value("normalised", "+", "%") == 0.0
    assert normalised("A man, an apple, the end") == "man apple end"


def test_ocr_by_hand():
    # kitten -> sitting: 3 edits, 7 letters
    assert value("ocr", "kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert value("ocr", "<answer> sitting </answer>", "sitting") == 1.0
    assert value("ocr", "", "abc") == 0.0
    assert value("ocr", "abd", ["xyz", "abc"]) == pytest.approx(2 / 3)
    assert value("ocr", "abc", None) is None


def test_relative_tolerance_by_hand():
    assert value("number", "104", 100, relative_tolerance=0.05) == 1.0
    assert value("number", "-96", -100, relative_tolerance=0.04) == 1.0
    assert value("number", "106", 100, relative_tolerance=0.05) == 0.0
    assert value("number", "106", 100, relative_tolerance=0.05, tolerance=6) == 1.0  # the larger one counts
    assert value("number", "0.1", 0, relative_tolerance=0.5) == 0.0


def test_marks_that_nobody_sees_at_the_ends_do_not_count():
    for name in ("exact", "normalised", "ocr"):
        assert value(name, "left", "\ufeffleft\u200b ") == value(name, "\u200eleft", "left") == 1.0


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("4", 1.0), ("5", 0.75), ("I see 3.", 0.75), ("8", 0.0), ("99", 0.0), ("many", 0.0)],
)
def test_counts_by_hand(completion, expected):
    assert value("count", completion, 4) == expected


def test_a_count_of_nothing():
    assert value("count", "0", 0) == 1.0 and value("count", "1", 0) == 0.0
    with pytest.raises(DataError, match="is not a count"):
        value("count", "1", 1.5)


def test_json_with_and_without_a_schema(tmp_path):
    schema = {"type": "object", "properties": {"total": {"type": "number"}}, "required": ["total"]}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    options = {"json_schema": str(file)}
    assert value("json", '{"total": 3.5}', **options) == 1.0
    assert value("json", '<answer>```json\n{"total": 3.5}\n```</answer>', **options) == 1.0
    assert value("json", '{"total": "3.5"}', **options) == 0.0
    assert value("json", "{total: 3.5}", **options) == 0.0
    assert value("json", '{"sum": 3}') == 1.0 and value("json", "3") == 0.0 and value("json", "") == 0.0
    assert value("json", "[" * 100_000) == 0.0


def test_a_schema_that_is_none_is_named(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "no such type"}')
    with pytest.raises(DataError, match=r"schema\.json is not a JSON schema"):
        value("json", "{}", json_schema=str(file))


def test_a_schema_fetches_nothing(tmp_path, monkeypatch):
    import socket

    file = tmp_path / "schema.json"
    file.write_text('{"$ref": "http://127.0.0.1:9/schema.json"}')
    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("a socket was opened"))
    with pytest.raises(DataError, match="refers to another"):
        value("json", "{}", json_schema=str(file))


@pytest.mark.parametrize("answer", ("NaN", "Infinity", "1" * 400, "[" * 400 + "]" * 400, "[NaN]"))
def test_what_is_no_json_or_too_much_for_a_schema_earns_nothing(tmp_path, answer):
    for number, schema in enumerate(({"type": "number", "multipleOf": 0.5}, {"type": "array", "items": {"$ref": "#"}})):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(schema))
        assert value("json", answer, json_schema=str(file)) == 0.0
    assert value("json", "[NaN]") == 0.0


def test_a_count_beyond_all_numbers_earns_nothing():
    assert value("count", "1e400", 3) == 0.0
