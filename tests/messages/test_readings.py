"""A message is translated as the right one and as a whole sentence, and no part of it stays English."""

import re

import pytest

from tests.config.recipes import write_files
from tests.config.test_wrong_recipes import WRONG, recipe_file
from tiercel.config import load_recipe
from tiercel.errors import DataError, NonFiniteError, RecipeError
from tiercel.messages import FIELD, LANGUAGES, _joined, table, translated
from tools.messages import errors_of

SIDE_BY_SIDE = re.compile(r"\{(\d+)\}(?=\{(\d+)\})")
WORDS = re.compile(r"\b(the|is|are|must|given|write|no|a|of|with|to|for|which|has|it|needs|only|and|or|not|in)\b")
PARTED = re.compile(r"[\u4e00-\u9fff] [\u4e00-\u9fff]")
VALUES = re.compile(r'"[^"]*"|`[^`]*`|\[.*?\]|\{.*?\}|\S*[/:_.#]\S*')
FOREIGN = re.compile(
    r"（Port could not[^）]*）|expected '}' before end of string|YAML 语法错误（[^）]*）"
)  # of libraries


@pytest.mark.parametrize("chosen", LANGUAGES)
def test_each_message_is_read_as_itself(chosen):
    templates = {text.strip(): other.strip() for text, other in table(chosen).items() if FIELD.search(text)}
    templates.pop("and {0} more")  # of a list, and a line of its own
    for text, other in templates.items():
        counts = {name.strip("{#}") for name in FIELD.findall(other) if "#" in name}
        values = {name: name if name in counts else f"f{name}.x" for name in map(_bare, FIELD.findall(text))}
        english = FIELD.sub(lambda found, values=values: values[_bare(found[0])], text)
        expected, *pieces = FIELD.split(other)
        for name, piece in zip(FIELD.findall(other), pieces, strict=True):
            expected = _joined(_joined(expected, values[_bare(name)]), piece)
        assert translated(english, chosen) == expected, text


def _bare(field: str) -> str:
    return field.strip("{!#}")


@pytest.mark.parametrize("chosen", LANGUAGES)
def test_fields_side_by_side_stay_there(chosen):
    """Where one ends and the next begins is not known: the first is read as empty."""
    for text, other in table(chosen).items():
        for first, second in SIDE_BY_SIDE.findall(text):
            assert re.search(rf"\{{{first}[!#]?\}}\{{{second}[!#]?\}}", other), text


def test_what_an_error_is_put_together_from_is_collected(tmp_path):
    (tmp_path / "code.py").write_text(
        'REMEDY = "write another one"\n'
        'OTHER = "said elsewhere only"\n'
        "def read(x):\n"
        '    kind = "a long one" if x else "a short one"\n'
        '    print("a line of the log")\n'
        '    raise RunError(f"{x} is {kind}; {REMEDY}")\n'
    )
    found = {message.text for message in errors_of(tmp_path / "code.py")}
    assert found == {"{0} is {1}; {2}", "a long one", "a short one", "write another one"}


def test_no_wrong_recipe_is_answered_half_in_english(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for wrong in WRONG:
        with pytest.raises(RecipeError) as caught:
            load_recipe(wrong.kind, recipe_file(wrong), wrong.overrides)
        for problem in caught.value.problems:
            said = translated(problem, "zh")
            left = VALUES.sub("", FOREIGN.sub("", said))
            assert not WORDS.search(left) and not PARTED.search(left), (problem, said)


@pytest.mark.parametrize(
    ("english", "expected"),
    [
        (
            "line 3, column 7: invalid syntax (expected ',' or '}', but got ':'); close the bracket",
            "第 3 行第 7 列：YAML 语法错误（expected ',' or '}', but got ':'）；把括号闭合",
        ),
        (
            "line 2, column 1: this line is indented with a tab; use spaces",
            "第 2 行第 1 列：这一行用制表符缩进；请用空格",
        ),
        ("data: has no value, but must be a list; use [a]", "data: 写的是 null；必须是列表；写 [a]"),
        (
            "train: is required; add the section with steps or epochs",
            "train: 缺少；写上这个小节，至少包括 steps 或 epochs",
        ),
        ("rows.jsonl:2 (rows:2) messages: the number of <image> marks is 2, but the number of images is 1",
         "rows.jsonl:2 (rows:2) messages: 有 2 个 <image> 标记，但图像有 1 张"),
        ("32 of 48, 66.67% of an epoch", "每步 32 行，共 48 行（epoch 的 66.67%）"),
        ("8 of only 1, so 8 epochs", "每步 8 行，数据共 1 行（每步 8 个 epoch）"),
        ("rows.jsonl#1000: the file has only 40 rows; use a smaller number",
         "rows.jsonl: `#1000` 多于文件的 40 行；写小一些的数，或去掉 `#`"),
        ("vm resolves to 127.0.0.1", "vm 解析为 127.0.0.1"),
        ("the command cannot be read: --learning_rate abc is not a number; use a number instead",
         "命令有误：--learning_rate abc 不是数；改成数"),
        ("--rlhf_type ppo is not a method of this version; nearest: tiercel grpo",
         "这个版本没有 --rlhf_type ppo 这种方法；最接近的是 tiercel grpo"),
        ("reward mine.py:score, row a: returned nan, but a reward must return a finite number, or None if it does "
         "not apply",
         "奖励 mine.py:score，行 a：返回了 nan；奖励要返回有限的数，不适用时返回 None"),
        ("algorithm.loss.call: mine.py:f returned values that are not finite, such as nan; correct the function "
         "and run the same command again",
         "algorithm.loss.call: mine.py:f 返回的值不是有限数，例如 nan；改正这个函数，再用同一条命令"),
        ("train.workers: unknown key (its value is 8); use data.workers (rows are encoded while training, by "
         "data.workers)",
         "train.workers: 没有这个键（写的是 8）；写 data.workers（数据在训练时编码，由 data.workers 的进程完成）"),
    ],
)  # fmt: skip
def test_sentences_are_whole(english, expected):
    assert translated(english, "zh") == expected


def test_lines_of_one_error_are_each_translated():
    error = NonFiniteError(
        "the loss is nan",
        [["rows:3"], ["rows:7"]],
        "`tiercel replay runs/x` computes it again, row by row, from runs/x/nonfinite",
    )
    assert translated(str(error), "zh") == (
        "损失是 NaN；涉及的行：rows:3 (rank 0), rows:7 (rank 1)；参数没有改动\n"
        "运行 `tiercel replay runs/x`，从 runs/x/nonfinite 逐行重算"
    )
    error = DataError(
        "a.jsonl: none of its rows (1) can be used as ms-swift rows for grpo:\n  a.jsonl:1 (a:1) id: cannot be read"
    )
    assert translated(str(error), "zh") == (
        "a.jsonl: 1 行里没有一行能用于 grpo（ms-swift 格式）：\n  a.jsonl:1 (a:1) id: 不能读取"
    )
    said = (
        "output: r/x was made with a different recipe; go on with the old values, or name another directory and start "
        "from its weights (lora.init: r/x; without lora, model.path: what `tiercel export r/x --merge` writes)"
    )
    assert translated(f"{said}\n  optim.lr: was 0.1, is 0.2 now\n  lora.rank: was 2, is 4 now", "zh") == (
        "output: r/x 是用另一个配方生成的；用原来的值继续，或换一个目录、从它的权重开始（lora.init: r/x；"
        "没有 lora 时，model.path 写 `tiercel export r/x --merge` 导出的目录）\n"
        "  optim.lr: 原来是 0.1，现在是 0.2\n  lora.rank: 原来是 2，现在是 4"
    )
