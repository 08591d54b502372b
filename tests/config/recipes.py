"""Good recipes to spoil. They name files that `write_files` creates in the working directory."""

from pathlib import Path

SFT = """\
model: {path: Qwen/Qwen2-VL-2B-Instruct}
lora: {rank: 8}
data: {train: rows.jsonl}
train: {steps: 10}
output: runs/sft
"""
GRPO = """\
model: {path: Qwen/Qwen2-VL-2B-Instruct}
lora: {rank: 8}
data: {train: rows.jsonl}
rewards: [{name: exact}, {name: format, weight: 0.2}]
train: {steps: 10}
output: runs/grpo
"""
GOOD = {
    "sft": SFT,
    "dpo": SFT.replace("runs/sft", "runs/dpo") + "dpo: {loss: sigmoid}\n",
    "kto": SFT.replace("runs/sft", "runs/kto") + "kto: {beta: 0.1}\n",
    "reward": SFT.replace("runs/sft", "runs/reward") + "ranking: {margin: 0.0}\n",
    "distill": SFT.replace("runs/sft", "runs/distill") + "teacher: {path: Qwen/Qwen2-VL-7B-Instruct}\n",
    "grpo": GRPO,
}


def write_files(directory: Path) -> None:
    (directory / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    (directory / "mine.py").write_text("def score(sample):\n    return 1.0\n", encoding="utf-8")
    (directory / "empty").mkdir()
    (directory / "everything").symlink_to("/")
    (directory / "checkpoint").mkdir()
    (directory / "checkpoint" / "config.json").write_text("{}", encoding="utf-8")
    for kind, text in GOOD.items():
        (directory / f"{kind}.yaml").write_text(text, encoding="utf-8")
