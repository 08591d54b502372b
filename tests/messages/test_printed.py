"""What the commands print in Chinese. What programs read does not change with the language."""

import json
import re

import pytest
from PIL import Image
from rich.cells import cell_len

from tests.reliability.test_watchdog import LIMIT, Ends, watchdog
from tiercel.cli.main import main
from tiercel.doctor.verdict import Verdict
from tiercel.errors import EXIT_STALL
from tiercel.reliability.diagnosis import Symptom
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.runs.progress import Progress

VERDICTS = (
    Verdict(name="torch", status="ok", found="2.13.0"),
    Verdict(name="import vllm", status="absent", found="not installed; needed for rollout.engine: vllm"),
    Verdict(
        name="disk",
        status="warning",
        found="1.0 GB free in /work",
        remedy="free some space, or set TMPDIR to another directory",
    ),
    Verdict(name="cuda bfloat16", status="broken", found="its process was killed by SIGFPE", remedy="upgrade"),
)
RECIPE = """
model: {{path: {model}, dtype: float32, max_pixels: 12544}}
lora: {{rank: 2}}
data: {{train: rows.jsonl, workers: 0, max_bad_fraction: 0.5}}
rewards: [{{name: exact}}]
rollout: {{group_size: 2, max_new_tokens: 4}}
optim: {{prompts_per_step: 2}}
train: {{steps: 1}}
output: run
"""


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("TIERCEL_LANG", "zh")


@pytest.fixture
def verdicts(monkeypatch):
    monkeypatch.setattr("tiercel.cli.doctor.examine", lambda directory: iter(VERDICTS))


@pytest.mark.usefixtures("chinese", "verdicts")
def test_the_columns_of_the_doctor_line_up(capsys):
    assert main(["doctor"]) == 2
    captured = capsys.readouterr()
    ok, absent, disk, remedy, broken, _, summary = captured.out.splitlines()
    found = ("2.13.0", "没有安装；用途：rollout.engine: vllm", "/work 剩余 1.0 GB", "进程被 SIGFPE 结束")
    columns = [cell_len(line[: line.index(text)]) for line, text in zip((ok, absent, disk, broken), found, strict=True)]
    assert set(columns) == {9 + 20 + 1}
    assert [line[:2] for line in (ok, absent, disk, broken)] == ["正常", "没有", "警告", "故障"]
    assert remedy == "         -> 腾出一些，或把 TMPDIR 设到别的目录"
    assert summary == "1 项正常，1 项警告，1 项故障"
    assert captured.err == "tiercel doctor: 故障：cuda bfloat16；按各行的提示处理，再运行一次\n"


@pytest.mark.usefixtures("verdicts")
def test_the_json_of_the_doctor_is_the_same_in_every_language(monkeypatch, capsys):
    said = []
    for asked in ("en", "zh"):
        monkeypatch.setenv("TIERCEL_LANG", asked)
        assert main(["doctor", "--json"]) == 2
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert json.loads(said[0])["verdicts"][2]["status"] == "warning"


@pytest.mark.usefixtures("chinese")
def test_a_wrong_recipe_has_the_same_exit_code(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(
        "model: {path: /nowhere/at/all}\ndata: {train: none.jsonl}\nlearning_rate: 1e-5\n"
    )
    assert main(["check", str(tmp_path / "recipe.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"tiercel check: {tmp_path / 'recipe.yaml'}: 5 个问题"
    assert "  learning_rate: 没有这个键（写的是 1e-05）；写 optim.lr" in lines
    assert "  output: 缺少；要写上：运行目录" in lines


def test_a_check_of_rows_is_chinese_and_names_the_broken_row(tmp_path, monkeypatch, capsys, tiny_checkpoints):
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    good = {"messages": [{"role": "user", "content": "<image>What?"}], "images": ["a.png"], "answer": "a"}
    bad = {**good, "images": ["b.png"]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (good, good, bad, good)))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_checkpoints["qwen2_5_vl"]))
    monkeypatch.chdir(tmp_path)
    said = {}
    for asked in ("en", "zh"):
        monkeypatch.setenv("TIERCEL_LANG", asked)
        assert main(["check", "recipe.yaml", "--fix-report", "--report-file", f"{asked}.jsonl"]) == 0
        said[asked] = capsys.readouterr().out
    assert (tmp_path / "en.jsonl").read_bytes() == (tmp_path / "zh.jsonl").read_bytes()
    assert "rows.jsonl: 4 行，tiercel 格式，拒绝 1 行" in said["zh"]
    assert "  拒绝 rows.jsonl:3 (rows:3) images: b.png: 没有这个文件" in said["zh"]
    assert "检查通过" in said["zh"] and "check passed" in said["en"]
    untold = [
        line for line in said["zh"].splitlines() if line in said["en"].splitlines() and re.search("[a-z]{3}", line)
    ]
    assert untold == []
    rows = [line for line in said["zh"].splitlines() if line.startswith("│")]
    assert rows and len({cell_len(line) for line in rows}) == 1


@pytest.mark.usefixtures("chinese")
def test_a_stall_is_printed_in_chinese_and_kept_in_english(tmp_path, capsys):
    heartbeat, ends = Heartbeat(), Ends()
    with watchdog(tmp_path, heartbeat, ends):
        heartbeat.begin("reward", 4, ["row-7"])
        assert ends.happened.wait(10 * LIMIT)
    assert ends.codes == [EXIT_STALL]
    said = capsys.readouterr().err
    assert "卡死：" in said and "在第 4 步的 reward 阶段，行 row-7" in said
    for file in ("log.txt", "stall/step-000004/message.txt"):
        text = (tmp_path / file).read_text()
        assert "stalled: no progress for" in text and "卡死" not in text


@pytest.mark.usefixtures("chinese")
def test_a_warning_is_printed_in_chinese_and_kept_in_english(tmp_path, capsys):
    text = "Over the last 5 steps 98 % of the completions were truncated."
    cause = "they have too few tokens for an answer, or the model does not end its turn"
    symptom = Symptom(key="truncated", step=7, text=text, cause=cause, recipe_key="rollout.max_new_tokens")
    with Progress(tmp_path / "log.txt", total_steps=9, log_every=1) as progress:
        progress.say(symptom.line)
    assert capsys.readouterr().err == (
        "第 7 步警告：最近 5 步里，98 % 的补全被截断。可能的原因：token 太少，写不完答案，或模型不结束这一轮。"
        "先看 rollout.max_new_tokens。\n"
    )
    assert symptom.line in (tmp_path / "log.txt").read_text()
