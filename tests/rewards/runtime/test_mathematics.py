"""The reward `math`, in its own process."""

import time

import pytest

from tests.rewards.samples import reward, sample
from tiercel.config.schema import Reliability
from tiercel.rewards.runtime.mathematics import score
from tiercel.rewards.runtime.scorer import Scorer

CASES = [
    ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
    ("So the result is $x^2 + 2x + 1$.", "$(x+1)^2$", 1.0),
    ("<answer>$\\sqrt{8}$</answer>", "$2\\sqrt{2}$", 1.0),
    ("The answer is 12", "12", 1.0),
    ("The answer is 13", "12", 0.0),
    ("no idea", "12", 0.0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1.0),
    (r"\boxed{\begin{pmatrix}1\\3\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0.0),
]


def test_expressions_that_are_equal_and_that_are_not():
    with Scorer([reward(name="math")], Reliability(), "resized_pixels") as scorer:
        found = scorer.score_samples([sample(completion, truth) for completion, truth, _ in CASES], [None] * len(CASES))
        (missing,) = scorer.score_samples([sample("12", None)], [None])
        (unreadable,) = scorer.score_samples([sample("12", "")], [None])
        column = reward(name="math", answer_column="solution")
    assert [each["math"].value for each in found] == [expected for _, _, expected in CASES]
    assert missing["math"].value is None and missing["math"].failure is None
    assert unreadable["math"].value is None and "math-verify can read reliably" in unreadable["math"].failure
    with Scorer([column], Reliability(), "resized_pixels") as scorer:
        (found,) = scorer.score_samples([sample("12", "13", columns={"solution": "$12$"})], [None])
    assert found["math"].value == 1.0


def test_what_would_take_years_to_compute_ends():
    limits = Reliability(reward_timeout=20)
    with Scorer([reward(name="math")], limits, "resized_pixels") as scorer:
        (found,) = scorer.score_samples([sample("$" + "9^{" * 6 + "9" + "}" * 6 + "$", "12")], [None])
        (after,) = scorer.score_samples([sample("12", "12")], [None])
    assert found["math"].value in (0.0, None)
    assert after["math"].value == 1.0


@pytest.mark.parametrize("name", ("math", "ocr"))
def test_a_missing_package_is_named_at_the_start(name, monkeypatch):
    from tiercel.errors import RecipeError
    from tiercel.rewards import base

    monkeypatch.setattr(base, "find_spec", lambda package: None)
    with pytest.raises(RecipeError, match=rf"rewards\.0\.name: {name} needs the package .*tiercel\[rewards\]"):
        Scorer([reward(name=name)], Reliability(), "resized_pixels").__enter__()


@pytest.mark.parametrize("filler", [" ", "\n", "*", "\\(", "\\boxed{", "answer ", "is ", "$5$"])
def test_a_model_that_repeats_itself_without_end_is_read_at_once(filler):
    score(sample("The answer is 12", "12"))  # imports what it needs
    start = time.monotonic()
    score(sample("The answer is " + filler * (20_000 // len(filler)) + "x", "12"))
    assert time.monotonic() - start < 3
