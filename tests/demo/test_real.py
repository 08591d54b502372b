"""The demo on real weights: its rows, from a small data set in easy-VQA's form. tests/real has the model."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tiercel.demo import real
from tiercel.demo.real_parts import (
    QuestionSample,
    VqaQuestion,
    answers_without_picture,
    drawn,
    require_packages,
    write_sample,
)
from tiercel.errors import EnvironmentProblem
from tools.demo.make_real_start import labels

RECIPES = Path(__file__).parents[2] / "recipes"
ASKED = (
    ("what is the blue shape?", "circle"),
    ("what color is the circle?", "blue"),
    ("is there not a circle?", "no"),
    ("is there not a triangle?", "yes"),
    ("is a blue shape present?", "yes"),
    ("is no red shape present?", "yes"),
    ("is a red shape present?", "no"),
)
KINDS_ASKED = ("shape", "color", "hasshape", "hasshape", "hascolor", "hascolor", "hascolor")


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Four pictures of each split, each with the same seven questions."""
    root = tmp_path / "site/easy_vqa"
    for split in ("train", "test"):
        (root / "data" / split / "images").mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (64, 64), (0, 0, 40 * number)).save(root / "data" / split / "images" / f"{number}.png")
        records = [(text, answer, number) for number in range(4) for text, answer in ASKED]
        (root / "data" / split / "questions.json").write_text(json.dumps(records))
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(root.parent))
    return root


def asked(text: str, answer: str) -> VqaQuestion:
    return VqaQuestion(number=0, text=text, answer=answer, picture=3)


def test_kinds():
    assert tuple(asked(*pair).kind for pair in ASKED) == KINDS_ASKED


@pytest.mark.parametrize(
    ("text", "answer", "known"),
    (
        ("what is the blue shape?", "circle", {"color": "blue", "shape": "circle"}),
        ("is there not a circle?", "no", {"shape": "circle"}),
        ("is there not a circle?", "yes", {}),
        ("is a blue shape present?", "yes", {"color": "blue"}),
        ("is a blue shape present?", "no", {}),
        ("is no red shape present?", "yes", {}),
    ),
)
def test_what_a_question_and_its_answer_say_of_the_picture(text, answer, known):
    assert dict(labels([asked(text, answer)]).get(3, {})) == known


def test_a_sample_has_as_many_of_each_kind_and_balanced_answers(package):
    sample = QuestionSample(name="rows", split="train", per_kind=2, seed=0, pictures=range(1, 4), is_balanced=True)
    found = drawn(sample)
    assert Counter(each.kind for each in found) == {"shape": 2, "color": 2, "hasshape": 2, "hascolor": 2}
    assert Counter(each.answer for each in found if each.kind == "hascolor") == {"yes": 1, "no": 1}
    assert {each.picture for each in found} <= {1, 2, 3} and drawn(sample) == found


def test_rows_and_the_control_with_another_picture(package, tmp_path):
    sample = QuestionSample(name="heldout", split="test", per_kind=4, seed=0, pictures=range(4))
    rows, swapped = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (write_sample(tmp_path, sample), tmp_path / "heldout-swapped.jsonl")
    )
    assert len(rows) == len(swapped) == 16
    for row, other in zip(rows, swapped, strict=True):
        assert row["messages"] == other["messages"] and row["answer"] == other["answer"]
        assert row["messages"][1]["content"] == row["answer"] and row["messages"][0]["content"].startswith("<image>\n")
        assert row["images"] != other["images"]
        assert all((tmp_path / file).is_file() for file in (*row["images"], *other["images"]))


def test_the_best_answer_without_a_picture():
    rows = [asked("is it?", "yes"), asked("is it?", "no"), asked("is it?", "no"), asked("what?", "blue")]
    assert dict(answers_without_picture(rows)) == {"is it?": "no", "what?": "blue"}


def test_a_missing_package_is_named_with_what_to_install(package, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tiercel.demo.real_parts.PACKAGES", ("easy_vqa", "gone_package"))
    with pytest.raises(EnvironmentProblem, match=r"gone_package.*pip install --no-deps"):
        require_packages()
    assert not (tmp_path / "runs").exists()


def test_the_recipe_reads_what_the_demo_writes():
    tree = yaml.safe_load((RECIPES / real.RECIPE).read_text())
    assert (tree["model"]["path"], tree["output"]) == (str(real.DATA / "start"), str(real.RUN))
    assert tree["data"]["train"] == str(real.DATA / f"{real.PRACTICE.name}.jsonl")
    assert tree["data"]["eval"] == str(real.DATA / f"{real.TEST.name}.jsonl")
