"""Each message has its Chinese, and what is printed uses it."""

import json
import re

import pytest

from tiercel.config.loading import problems_of_text
from tiercel.messages import FIELD, FOLDER, LANGUAGES, language, table, translated
from tiercel.messages.console import padded
from tools.messages import MODULES, files_of, kept, messages, messages_of, missing

CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("TIERCEL_LANG", "zh")


@pytest.mark.parametrize("chosen", LANGUAGES)
def test_every_message_has_its_counterpart(chosen):
    lacking = missing(chosen)
    assert lacking == [], f"write them into tiercel/messages/{chosen}/, or tools/kept_messages.json: {lacking}"


@pytest.mark.parametrize("chosen", LANGUAGES)
def test_every_counterpart_has_its_message(chosen):
    said = {message.text.strip() for message in messages()}
    code = "\n".join(file.read_text(encoding="utf-8") for module in MODULES for file in files_of(module))
    words = json.loads((FOLDER / chosen / "words.json").read_text(encoding="utf-8"))
    known = {text.strip() for text in table(chosen)} - words.keys()
    assert known - said == set(), "no module says these any more"
    assert [word for word in words if f'"{word}"' not in code and f"'{word}'" not in code] == []
    assert set(kept()) - said == set()
    assert set(kept()) & known == set()


@pytest.mark.parametrize("chosen", LANGUAGES)
def test_a_counterpart_has_the_fields_of_its_message_and_words_of_its_own(chosen):
    for text, other in table(chosen).items():
        fields = {name.strip("{!#}") for name in FIELD.findall(other)}
        assert fields <= {name.strip("{}") for name in FIELD.findall(text)}, text
        assert other != text, f"{text}: the same in both languages; it belongs into tools/kept_messages.json"
        assert "\u2014" not in other, text


def test_messages_are_found_where_they_stand_in_the_code(tmp_path):
    (tmp_path / "code.py").write_text(
        '"""A docstring is no message."""\n'
        'x = f"{a} given; {b:.2f} more"\n'
        'y = counted(2, "row") + "one" + "two words" + re.compile("a pattern of words")\n'
    )
    found = {message.text: message.place for message in messages_of(tmp_path / "code.py")}
    assert found.keys() == {"{0} given; {1} more", "{0} row", "{0} rows", "two words"}
    assert found["two words"].endswith("code.py:3")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN"}, "zh"),
        ({"LC_ALL": "zh_CN.UTF-8", "TIERCEL_LANG": "en"}, "en"),
        ({"LC_ALL": "C", "TIERCEL_LANG": "zh"}, "zh"),
        ({"TIERCEL_LANG": "", "LANG": "zh_TW"}, "zh"),
    ],
)
def test_the_first_variable_that_is_set_decides(environment, expected):
    assert language(environment) == expected


def test_english_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("TIERCEL_LANG", "en")
    assert translated("learning_rate: unknown key (its value is 1e-05); use optim.lr") == (
        "learning_rate: unknown key (its value is 1e-05); use optim.lr"
    )


@pytest.mark.usefixtures("chinese")
@pytest.mark.parametrize(
    ("english", "expected"),
    [
        (
            "learning_rate: unknown key (its value is 1e-05); use optim.lr",
            "learning_rate: 没有这个键（写的是 1e-05）；写 optim.lr",
        ),
        (
            'optim.lr: is "1e-5", but must be a number, not text; use 1e-5 without quotes',
            'optim.lr: 写的是 "1e-5"；必须是数，不能是文本；写 1e-5，不加引号',
        ),
        (
            "optim.warmup_steps: has no value, but must be a whole number, at least 0; remove the key to get 0",
            "optim.warmup_steps: 写的是 null；必须是整数，至少 0；不写这个键就是 0",
        ),
        (
            "  rejected rows.jsonl:3 (rec-17) images: there is no such file under data.image_root (images)",
            "  拒绝 rows.jsonl:3 (rec-17) images: 没有这个文件（data.image_root 是 images）",
        ),
        (
            "  rank 1 (node-2, process 4711) is in phase reward of step 12, rows a, b; the others wait for it",
            "  rank 1（node-2，进程 4711）在第 12 步的 reward 阶段，行 a, b；其他 rank 在等它",
        ),
        ("rewards.1.name: must be one of exact, number, json", "rewards.1.name: 必须是 exact, number, json 之一"),
    ],
)
def test_parts_are_translated_and_keys_and_values_stay(english, expected):
    assert translated(english) == expected


@pytest.mark.usefixtures("chinese")
def test_what_has_no_counterpart_stays_english():
    text = 'ValueError: my own reward says: row 7 is odd\n  File "mine.py", line 3'
    assert translated(text) == text
    text = "held out, step 0: accuracy 0.373 (95 % interval 0.344 to 0.403), mean reward 0.456 on 1024 held-out rows"
    assert translated(text) == text  # and is not a mixture of both, although it has known parts


@pytest.mark.usefixtures("chinese")
def test_lines_of_a_message_keep_their_places():
    text = "rejected 3 of 10 rows, more than data.max_bad_fraction = 0.01 allows; correct the rows or raise it."
    found = translated(f"{text} The first:\n  rows.jsonl:2 (rows:2) row: is nested too deeply\n  and 4 more")
    first, second, third = found.split("\n")
    assert first.startswith("10 行中有 3 行被拒绝")
    assert second == "  rows.jsonl:2 (rows:2) row: 嵌套太深"
    assert third == "  还有 4 个"


@pytest.mark.usefixtures("chinese")
def test_the_problems_of_a_wrong_recipe_are_chinese_from_end_to_end():
    recipe = """
model: {path: /nowhere/at/all, min_pixels: 9, max_pixels: 4}
lora: {rnk: 4, dropout: 0.5}
data: {train: none.jsonl, format: swfit, eval: {}}
rewards: [{name: exact, threshold: 2}, {name: exact}]
rollout: {group_size: 1, top_p: 0.9}
optim: {lr: "1e-5", minibatches: 3}
train: {steps: 10, epochs: 2, eval_every: 0}
output: ""
"""
    problems = problems_of_text(recipe, "grpo")
    assert len(problems) >= 12
    for problem in problems:
        key, _, said = translated(problem).partition(": ")
        assert problem.startswith(f"{key}: ")
        assert CHINESE.search(said), problem
        left = re.sub(r'"[^"]*"|[\w./-]*[._/:-][\w./:-]*|\[.*?\]|\{.*?\}', "", said)  # values, keys and files
        assert not re.search(r"\b(the|is|must|use|but|write|no)\b", left), said


def test_columns_line_up_by_the_width_of_a_terminal():
    assert padded("ok", 9) == "ok       "
    assert padded("\u6b63\u5e38", 9) == "\u6b63\u5e38     "  # two characters that are two columns wide
