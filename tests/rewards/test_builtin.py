from pathlib import Path

import pytest

from tests.rewards.samples import reward, sample
from tiercel.config.keys import allowed_words, keys_of
from tiercel.errors import DataError
from tiercel.rewards.base import RewardEntry, TruthReward
from tiercel.rewards.registry import BUILTIN, KINDS, TELLS_RIGHT
from tiercel.rewards.runtime.batches import STARTERS
from tools.docs.rewards import TABLE, table
from tools.docs.tables import with_table


def value(name, row, **options):
    return reward(name=name, **options).score(row)


def test_every_name_of_the_schema_is_built_in_and_says_what_it_takes():
    assert set(BUILTIN) == set(allowed_words(keys_of("grpo")["rewards.N.name"].field.annotation))
    assert len(BUILTIN) == len(KINDS) - 1  # each has its own name, except the user's by call
    for name, kind in BUILTIN.items():
        is_scored = kind.score not in (RewardEntry.score, TruthReward.score)
        is_compared = getattr(kind, "compare", TruthReward.compare) is not TruthReward.compare
        hears_others = kind.score_after is not RewardEntry.score_after
        assert [is_scored, is_compared, hears_others, kind in STARTERS].count(True) == 1, name
        assert kind.reads and kind.__doc__


def test_the_document_lists_every_reward():
    """Mended by: make docs."""
    document = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert with_table(document, TABLE, table()) == document


def test_the_recipes_rules_know_which_rewards_tell_right_from_wrong():
    simple = [
        name for name, kind in BUILTIN.items() if not any(key.is_required() for key in kind.model_fields.values())
    ]
    assert [name for name in simple if reward(name=name).right_from is not None] == list(TELLS_RIGHT)
    assert reward(name="iou").right_from == reward(name="vlm_r1_rec").right_from == 0.5
    assert reward(name="iou", correct_at=0.75).right_from == 0.75


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>7</answer>", 1.0),
        ("<think>a\nb</think>\n<answer>7\n</answer>\n", 1.0),
        ("I see <answer>7</answer>", 0.0),
        ("<answer>7</answer> indeed", 0.0),
        ("<answer>7</answer> <answer>8</answer>", 0.0),
        ("<think>7 <answer>7</answer>", 0.0),
        ("7", 0.0),
        ("", 0.0),
    ],
)
def test_format_asks_for_one_answer_at_the_end(completion, expected):
    assert value("format", sample(completion)) == expected


THINK_PATTERNS = (  # of ms-swift and VLM-R1, of TRL
    r"<think>.*</think>\s*<answer>.*</answer>",
    r"<think>(?!.*<think>).*</think>.*",
)


@pytest.mark.parametrize("pattern", [None, *THINK_PATTERNS])
@pytest.mark.parametrize(
    ("opened", "completion", "expected"),
    [
        ("<think>\n", "Two cups.</think>\n\n<answer>2</answer>", 1.0),
        ("<think>\n", "</think><answer>2</answer>", 1.0),
        ("<think>", "a\nb\n</think>\n<answer>2</answer>", 1.0),
        ("<think>\n", "Two cups.<answer>2</answer>", 0.0),  # never closed
        ("", "Two cups.</think><answer>2</answer>", 0.0),  # never opened
        ("<think>\n\n</think>\n\n", "<think>Two.</think><answer>2</answer>", 1.0),
    ],
)
def test_format_counts_a_thought_that_the_template_opens(pattern, opened, completion, expected):
    assert value("format", sample(completion, opened=opened), pattern=pattern) == expected


def test_a_thought_that_the_template_opened_is_not_opened_again():
    asked = sample("<think>Two.</think><answer>2</answer>", opened="<think>\n")
    assert value("format", asked) == 0.0
    assert value("format", asked, pattern=THINK_PATTERNS[1]) == 1.0  # this fits what was sampled


def test_a_pattern_for_what_is_sampled_fits_it_as_well():
    asked = sample("Two.</think><answer>2</answer>", opened="<think>\n")
    assert value("format", asked, pattern=r"[^<]*</think>\s*<answer>\d+</answer>") == 1.0


def test_format_knows_a_thought_by_the_name_that_the_template_gives_it():
    assert value("format", sample("Two.</thinking><answer>2</answer>", opened="<thinking>\n")) == 1.0
    assert value("format", sample("Two.</think><answer>2</answer>", opened="<thinking>\n")) == 0.0


def test_a_template_that_closes_the_thought_needs_no_other():
    asked = sample("<answer>2</answer>", opened="<think>\n\n</think>\n\n")
    assert value("format", asked) == value("format", asked, pattern=THINK_PATTERNS[0]) == 1.0


def test_format_pattern_matches_the_whole_completion_and_line_ends():
    assert value("format", sample("A: x\ny"), pattern="A: .*") == 1.0
    assert value("format", sample("so A: x"), pattern="A: .*") == 0.0


def test_exact_compares_stripped_text_in_one_unicode_form():
    assert value("exact", sample("<answer> caf\u00e9 </answer>", "cafe\u0301")) == 1.0
    assert value("exact", sample("<answer>Dog</answer>", "dog")) == 0.0
    assert value("exact", sample("7", "<answer>7</answer>")) == 1.0
    assert value("exact", sample("7", 7)) == 1.0


def test_number_is_exact_and_takes_a_tolerance():
    assert value("number", sample("<answer>0.50</answer>", 0.5)) == 1.0
    assert value("number", sample("<answer>1,000 apples</answer>", "1000")) == 1.0
    assert value("number", sample("<answer>1/3</answer>", 0.3333)) == 0.0
    assert value("number", sample("<answer>1.1</answer>", 1), tolerance=0.1) == 1.0  # in floats 1.1 - 1 > 0.1
    assert value("number", sample("<answer>1.11</answer>", 1), tolerance=0.1) == 0.0
    assert value("number", sample("<answer>none</answer>", 1), tolerance=5) == 0.0


def test_choice_takes_letters_or_the_recipes_own():
    assert value("choice", sample("The answer is (B).", "b")) == 1.0
    assert value("choice", sample("C", "B")) == 0.0
    assert value("choice", sample("cannot say", "B")) == 0.0
    assert value("choice", sample("Yes.", "yes"), choices=("yes", "no")) == 1.0
    assert value("choice", sample("2", 2), choices=("1", "2")) == 1.0


def test_iou_maps_the_answer_to_original_pixels():
    # [40, 5, 400, 50] in the 400 x 50 picture is [20, 10, 200, 100] in the 200 x 100 original: 180 * 90 pixels, of
    # which 90 * 90 are right.
    row = sample("<answer>[40, 5, 400, 50]</answer>", [110, 10, 200, 100])
    assert value("iou", row) == pytest.approx(0.5)
    same_box = sample("<answer>(100,100),(1000,1000)</answer>", [20, 10, 200, 100], coordinate_space="thousandths")
    assert value("iou", same_box) == pytest.approx(1.0)
    assert value("iou", sample("<answer>[40, 5, 400, 50]</answer>", '{"bbox_2d": [20, 10, 200, 100]}')) == 1.0


def test_iou_without_a_box_or_with_an_inverted_one_is_zero():
    assert value("iou", sample("<answer>left</answer>", [20, 10, 200, 100])) == 0.0
    assert value("iou", sample("<answer>[400, 50, 40, 5]</answer>", [20, 10, 200, 100])) == 0.0


@pytest.mark.parametrize(("token_count", "expected"), [(1, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (50, 0.0)])
def test_length_falls_linearly_to_zero_at_twice_the_limit(token_count, expected):
    assert value("length", sample("x", token_count=token_count), max_tokens=10) == expected


@pytest.mark.parametrize("name", ["exact", "number", "choice", "iou"])
def test_a_row_without_a_right_answer_gets_none(name):
    assert value(name, sample("7", None)) is None
    assert value(name, sample("7", "here"), answer_column="elsewhere") is None
    assert value(name, sample("7", "here", columns={"elsewhere": None}), answer_column="elsewhere") is None


def test_answer_column_holds_the_right_answer():
    assert value("number", sample("7", 8, columns={"count": 7}), answer_column="count") == 1.0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("exact", [["a"]]),
        ("exact", True),
        ("number", "seven"),
        ("number", True),
        ("number", float("nan")),
        ("choice", "the dog"),
        ("choice", 2),
        ("choice", ["B"]),
        ("iou", [1, 2, 3]),
        ("iou", [1, 2, 3, "4"]),
        ("iou", [1, 2, 3, float("nan")]),
        ("iou", [1, 2, 3, 10**400]),
        ("iou", [10, 2, 3, 40]),
        ("iou", [[1, 2, 3, 4]]),
        ("iou", "left"),
    ],
)
def test_a_malformed_right_answer_names_row_and_column(name, answer):
    with pytest.raises(DataError, match=r"row row-1, column truth: .* ") as caught:
        value(name, sample("7", None, columns={"truth": answer}), answer_column="truth")
    assert caught.value.field == "truth"


def test_iou_on_a_row_without_images_is_malformed():
    with pytest.raises(DataError, match=r"row row-1, column answer: .* no image"):
        value("iou", sample("[1, 2, 3, 4]", [1, 2, 3, 4], has_image=False))
