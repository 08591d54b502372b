import time
from fractions import Fraction

import pytest

from tiercel.rewards.answers import extract_answer, parse_box, parse_choice, parse_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<think>4 or 5</think>\n<answer>5</answer>", "5"),
        ("<answer>1</answer> no: <answer>2</answer>", "2"),
        ("<answer>1</answer> no: <answer>2", "1"),
        ("<answer>1</answer> and </answer>", "1"),
        ("<answer>a <answer>b</answer>", "b"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        (" seven ", "seven"),
        ("before <think>no</think> after", "before  after"),
        ("it is 3</think> 4", "4"),
        ("<think>perhaps [1, 2, 3, 4]", ""),
        ("<think>4</think>So it is <|begin_of_box|> 5 <|end_of_box|>.", "5"),
        ("<answer><|begin_of_box|>[[1, 2, 3, 4]]<|end_of_box|></answer>", "[[1, 2, 3, 4]]"),
        ("<|begin_of_box|>5<|end_of_box|> or <|begin_of_box|>6<|end_of_box|>", "5  or  6"),
        ("<|begin_of_box|>5", "5"),
        ("", ""),
    ],
)
def test_answer_is_the_last_complete_tag_or_all_but_the_thought(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", Fraction(7)),
        ("-3", Fraction(-3)),
        ("\u22123", Fraction(-3)),
        ("+4", Fraction(4)),
        ("1.50", Fraction(3, 2)),
        (".5", Fraction(1, 2)),
        ("3.", Fraction(3)),
        ("1e-3", Fraction(1, 1000)),
        ("1,234", Fraction(1234)),
        ("1,234,567.8", Fraction(12345678, 10)),
        ("1,2,3", None),
        ("1,2345", None),
        ("3/4", Fraction(3, 4)),
        ("-1/3", Fraction(-1, 3)),
        ("2 1/2", Fraction(5, 2)),
        ("1.5/2", Fraction(3, 4)),
        (r"$\frac{3}{4}$", Fraction(3, 4)),
        (r"\boxed{42}", Fraction(42)),
        ("50%", Fraction(50)),
        ("$1,000.00", Fraction(1000)),
        ("72kg", Fraction(72)),
        ("3 + 4 = 7", Fraction(7)),
        ("3-4", None),
        ("The answer is 12.", Fraction(12)),
        ("\u7b54\u6848\u662f5", Fraction(5)),
        ("It is minus 3 degrees.", Fraction(-3)),
        ("The answer is negative 3", Fraction(-3)),
        ("\u96f6\u4e0b3\u5ea6", Fraction(-3)),
        ("5 minus 3", None),
        ("minus -3", None),
        ("x minus 3", None),
        ("two minus 5", None),
        ("plus or minus 5", None),
        ("a non-negative 5", Fraction(5)),
        ("1/0", None),
        ("seven", None),
        ("x2", None),
        ("nan", None),
        ("inf", None),
        ("", None),
    ],
)
def test_number_is_the_last_one_and_exact(text, number):
    assert parse_number(text) == number


def test_numbers_too_long_to_compute_with_are_none_at_once():
    start = time.monotonic()
    assert parse_number("1e999999999") is None
    assert parse_number("9" * 100_000) is None
    assert time.monotonic() - start < 30  # a search that goes astray takes hours


@pytest.mark.parametrize(
    "filler",
    [
        " ",
        "\n",
        "(",
        "[",
        "1",
        "1,",
        "1 ",
        "[1, ",
        "(1,2)",
        "<think>",
        "answer ",
        "B.",
        "B ",
        "answer is 5. ",
        "\\boxed{",
        "B or ",
    ],
)
@pytest.mark.parametrize("beginning", ["", "answer", "(1,2)"])
def test_a_model_that_repeats_itself_without_end_is_read_at_once(beginning, filler):
    text = beginning + filler * (20_000 // len(filler)) + "x"
    start = time.monotonic()
    parse_number(extract_answer(text)), parse_choice(text), parse_box(text)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("**B**", "B"),
        (r"\boxed{B}", "B"),
        ("Option B", "B"),
        ("B. the dog", "B"),
        ("B - the dog", "B"),
        ("(B) \u2013 Paris", "B"),
        ("A - B", None),
        ("C - D - E", None),
        ("(B) the dog", "B"),
        ("B: a dog", "B"),
        ("The answer is B", "B"),
        ("The answer is B, not C", "B"),
        ("First I said the answer is A. The correct answer is (C) dog.", "C"),
        ("**Answer:** D", "D"),
        ("the answer is option B because", "B"),
        ("It must be B.", "B"),
        ("It is a dog", None),
        ("the answer is a dog", None),
        ("DOG", None),
        ("\u0131", None),  # a dotless i matches I in a pattern, but is not I
        ("", None),
    ],
)
def test_choice_letters(text, choice):
    assert parse_choice(text) == choice


def test_choices_of_words_ignore_case_and_come_back_as_the_recipe_spells_them():
    assert parse_choice("YES", ("yes", "no")) == "yes"
    assert parse_choice("I think the answer is No.", ("yes", "no")) == "no"
    assert parse_choice("none", ("no", "none")) == "none"
    assert parse_choice("E", ("A", "B", "C", "D")) is None
    assert parse_choice("b", ("b", "B")) == "b"
    assert parse_choice("B", ("b", "B")) == "B"


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("[12, 30, 45, 60]", (12, 30, 45, 60)),
        ("[1.5,-2,.5,1e2]", (1.5, -2, 0.5, 100)),
        ("[10\uff0c20\uff0c30\uff0c40]", (10, 20, 30, 40)),
        ("\uff3b10, 20, 30, 40\uff3d", (10, 20, 30, 40)),
        ('```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "7"}]\n```', (1, 2, 3, 4)),
        ("(1,2),(3,4)", (1, 2, 3, 4)),
        ("<|box_start|>(100, 200), (300, 400)<|box_end|>", (100, 200, 300, 400)),
        ("[[1, 2], [3, 4]]", (1, 2, 3, 4)),
        ("[1, 2, 3] then [5, 6, 7, 8] then [9, 9, 9, 9]", (5, 6, 7, 8)),
        ("[4, 3, 2, 1]", (4, 3, 2, 1)),
        ("[1, 2, 3, 4, 5]", None),
        ("[1, 2, 3, 4", None),
        ("1, 2, 3, 4", None),
        ("[1, 2, 3, 1e999]", None),
        ("[one, 2, 3, 4]", None),
        ("", None),
    ],
)
def test_box_is_the_first_list_of_four_numbers(text, box):
    assert parse_box(text) == box
