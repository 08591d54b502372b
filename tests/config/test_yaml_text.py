"""YAML as recipes use it."""

import math

import pytest

from tiercel.config.yaml_text import LARGEST_TEXT, YamlProblem, parse, render


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.0e-5", 1e-5),
        ("1E-5", 1e-5),
        ("1e5", 100000.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("3", 3),
        ("1_003_520", 1003520),
        ("010", 10),
        ("true", True),
        ("yes", "yes"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("2024-01-01", "2024-01-01"),
        ("12:30", "12:30"),
        ("1.2.3", "1.2.3"),
        ("'1e-5'", "1e-5"),
        ("[a, 1e-3]", ["a", 1e-3]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("{1: x, true: y}", {"1": "x", "true": "y"}),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object):
    parsed, twice = parse(text)
    assert parsed == value and type(parsed) is type(value)
    assert twice == []


def test_infinities_and_nan_are_numbers():
    assert parse("-.inf")[0] == -math.inf
    assert math.isnan(parse(".nan")[0])


def test_every_key_given_twice_is_told_with_its_lines():
    assert parse("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n")[1] == [
        "a: is set twice, on lines 1 and 5; keep one",
        "c: is set twice, on lines 3 and 4; keep one",
    ]


def test_a_merge_is_no_duplicate():
    assert parse("base: &b {x: 1, y: 2}\nnew: {<<: *b, x: 3}\n") == (
        {"base": {"x": 1, "y": 2}, "new": {"x": 3, "y": 2}},
        [],
    )


@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        ("a: [1", "line 1, column 6", "close the bracket"),
        ("a:\n\tb: 1", "line 2, column 1", "use spaces"),
        ("a: b: c", "line 1, column 5", "in quotes"),
        ("a: 'x", "line 1, column 6", "close the quote"),
        ("a: 1\n---\nb: 2", "line 2, column 1", "keep only one document"),
        ("a: &x [*x]", "line 1, column 4", "an alias cannot be inside"),
        ("a: *x", "line 1, column 4", "undefined alias"),
        ("a: !!python/name:os.system", "line 1, column 4", "use plain values"),
        ("a: !!int x", "line 1, column 4", "not a value of this type"),
        ("a: !!map 3", "line 1, column 4", "key: value"),
        ("b: 1\n? [a]\n: 2", "line 2, column 3", "single word"),
        ("b: 1\na: x\x00", "line 2, column 5", "remove it"),
        ('a: "\\ud800"', "line 1, column 4", "not a value of this type"),
    ],
)
def test_faults_are_placed_and_explained(text: str, place: str, remedy: str):
    with pytest.raises(YamlProblem) as caught:
        parse(text)
    assert str(caught.value).startswith(place) and remedy in str(caught.value)


def test_what_is_written_reads_back():
    words = [
        "yes",
        "1e-5",
        "1_0",
        "null",
        "~",
        "",
        "true",
        "010",
        "<<",
        "2024-01-01",
        "-",
        ".5",
        "x: y",
        "#",
        "a\nb",
        " é",
    ]
    value = {
        "words": words,
        "numbers": [1e-5, 0.1, 1e22, math.inf, 3],
        "none": None,
        "empty": {},
        "list": [],
        "on": True,
    }
    assert parse(render(value)) == (value, [])
    assert list(parse(render(value))[0]) == list(value)


BOMBS = {
    "sequences": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 12)),
    "mappings": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}}}\n" for i in range(1, 40)),
    "merges": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_that_repeat_without_end_are_refused(kind):
    assert len(BOMBS[kind]) < 2000
    with pytest.raises(YamlProblem, match="at most 100,000"):
        parse(BOMBS[kind])


def test_aliases_of_a_recipe_are_read():
    text = "sizes: &sizes {rank: 8, alpha: 16}\nfirst: *sizes\nsecond: {<<: *sizes, rank: 4}\n"
    tree, problems = parse(text)
    assert tree["first"] == {"rank": 8, "alpha": 16} and tree["second"] == {"rank": 4, "alpha": 16} and not problems


def test_a_text_longer_than_any_recipe_is_refused():
    with pytest.raises(YamlProblem, match="1,048,577 characters"):
        parse("x" * (LARGEST_TEXT + 1))
