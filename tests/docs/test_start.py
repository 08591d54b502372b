"""Whoever follows docs/start.md gets what it says: its files are written, and its commands run on a tiny model."""

import runpy
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks, commands
from tiercel.cli.main import main

PAGE = DOCS / "start.md"
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
# Each has its own test, or belongs to another program.
NOT_RUN_HERE = {
    ("pip", "install", "tiercel[demo]"),
    ("tiercel", "--version"),
    ("tiercel", "doctor"),
    ("tiercel", "demo"),
    ("python", "draw.py"),  # run by run_path
    ("vllm", "serve", "runs/squares/model"),
    ("tiercel", "serve", "squares.yaml", "--port", "8000"),
}
SMALL = ["model.dtype=float32", "data.workers=0", "rollout.max_new_tokens=6", "train.threads=1"]
SHORT = {"grpo": ["train.steps=2", "train.save_every=2", "train.eval_every=2", "rollout.group_size=2"]}


def files_of(page: Path) -> dict[str, str]:
    """The programs and recipes of a page, by the name in their first line."""
    texts = [*blocks(page, "python"), *blocks(page, "yaml")]
    return {text.partition("\n")[0].removeprefix("# "): text for text in texts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoints):
    """A folder with the page's files, whose recipe names a tiny model."""
    folder = tmp_path_factory.mktemp("start")
    for name, text in files_of(PAGE).items():
        (folder / name).write_text(text.replace(MODEL, str(tiny_checkpoints["qwen2_5_vl"])))
    return folder


def test_the_commands_run_in_the_order_of_the_page(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    runpy.run_path("draw.py")
    assert len(list(Path("squares").glob("*.png"))) == 48
    ran = []
    for words in commands(PAGE):
        if tuple(words) in NOT_RUN_HERE:
            continue
        assert words[0] == "tiercel"
        verb, rest = words[1], list(words[2:])
        if "squares.yaml" in rest:
            place = rest.index("squares.yaml") + 1
            rest[place:place] = [*SMALL, *SHORT.get(verb, [])]
        assert main([verb, *rest]) == 0, words
        ran.append(verb)
    assert ran == ["check", "data", "plan", "grpo", "runs", "report", "eval", "predict", "export", "serve"]
    assert Path("preview.html").is_file() and Path("runs/squares/report.html").is_file()
    assert Path("runs/squares/model/model.safetensors").is_file()
    printed = capsys.readouterr().out
    for line in ("squares/train.jsonl: 40 rows in tiercel format, 0 rejected", "check passed", "--max-lora-rank 16"):
        assert line in printed


def test_what_is_not_run_here_is_on_the_page():
    assert {tuple(words) for words in commands(PAGE)} >= NOT_RUN_HERE


def test_the_model_for_machines_without_a_gpu_is_what_the_demo_leaves():
    assert "model: {path: runs/demo-sft/model, dtype: float32}" in PAGE.read_text(encoding="utf-8")
    recipe = (DOCS.parent / "recipes" / "demo-grpo.yaml").read_text(encoding="utf-8")
    assert "model: {path: runs/demo-sft/model, dtype: float32}" in recipe
