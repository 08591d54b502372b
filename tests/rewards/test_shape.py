"""Rewards for length and repetition against numbers worked by hand."""

import math

import pytest

from tests.rewards.samples import reward, sample
from tiercel.config.schema import Reliability
from tiercel.rewards.base import RowFilter
from tiercel.rewards.runtime.scorer import Scorer


def value(name: str, completion: str = "", tokens: int = 3, **options) -> float:
    return reward(name=name, **options).score(sample(completion, token_count=tokens))


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (150, -1.0)])
def test_soft_overlong_by_hand(tokens, expected):
    assert value("soft_overlong", tokens=tokens, max_tokens=100, buffer=20) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("one two three four", 0.0),  # two runs of three, both once
        ("a b a b a b", -(1 - 2 / 4)),  # aba bab aba bab
        ("go go go go go", -(1 - 1 / 3)),
        ("Go go GO go go", -(1 - 1 / 3)),
        ("short one", 0.0),
        ("\u6211\u770b\u5230" * 3, -(1 - 3 / 7)),  # three characters, three times: 7 runs, 3 of them distinct
        ("\u4e00\u4e8c\u4e09\u56db", 0.0),
        ("\u0e04\u0e19" * 3, -(1 - 2 / 4)),
        ("\uac00 \ub098 \ub2e4 \uac00 \ub098 \ub2e4", -(1 - 3 / 4)),  # Korean has spaces
        ("x\u4e00y\u4e00x\u4e00y", -(1 - 4 / 5)),
        ("0," * 20, -(1 - 2 / 38)),
        ("a" * 33, -(1 - 1 / 31)),
        ("a" * 32, 0.0),  # a word
        ("", 0.0),
    ],
)
def test_repetitions_by_hand(completion, expected):
    assert value("repetition", completion) == pytest.approx(expected)


def test_repetitions_of_single_words():
    assert value("repetition", "a b a b", ngram=1) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("tokens", "is_right", "expected"),
    [(0, True, 1.0), (50, True, 0.75), (100, True, 0.5), (200, True, 0.5), (0, False, -0.5), (50, False, -0.25),
     (100, False, 0.0), (25, True, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)))],
)  # fmt: skip
def test_the_cosine_by_hand(tokens, is_right, expected):
    entry = reward(name="cosine", max_tokens=100)
    assert entry.score_after(sample(token_count=tokens), is_right) == pytest.approx(expected)


def test_the_cosine_hears_from_the_rewards_before_it():
    rewards = [reward(name="exact"), reward(name="cosine", max_tokens=100)]
    with Scorer(rewards, Reliability(), "resized_pixels") as scorer:
        samples = [
            sample("7", "7", token_count=50),
            sample("8", "7", token_count=50),
            sample("7", None, token_count=50),
        ]
        right, wrong, unknown = scorer.score_samples(samples, [None] * 3)
    assert right["cosine"].value == pytest.approx(0.75)
    assert wrong["cosine"].value == pytest.approx(-0.25)
    assert unknown["cosine"].value is None and unknown["cosine"].failure is None


def test_a_reward_applies_to_the_rows_it_is_for():
    rewards = [
        reward(name="exact", where=RowFilter(column="task", equals=("ocr", "true"))),
        reward(name="number", where=RowFilter(column="task", equals=("counting",))),
    ]
    tasks = ("ocr", "counting", True, None)
    samples = [sample("7", "7", columns={} if task is None else {"task": task}) for task in tasks]
    with Scorer(rewards, Reliability(), "resized_pixels") as scorer:
        found = scorer.score_samples(samples, [None] * len(samples))
    assert [each["exact"].value for each in found] == [1.0, None, 1.0, None]
    assert [each["number"].value for each in found] == [None, 1.0, None, None]
