"""The inputs of the commands in docs/silent-faults.md: `python -m tests.docs.silent_faults faults` writes them into the
folder `faults`. They need no network: the model is the demo's."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tiercel.demo.pointing import START

RANK, WIDTH, LAYERS = 4, 128, 3  # of the adapters; the width and the layers are the model's
RECIPE = """\
model: {path: model, dtype: float32}
lora: {rank: 4, alpha: 8, targets: 'model\\.language_model\\.layers\\.\\d+\\.self_attn\\.q_proj'}
data: {train: rows.jsonl, image_root: images, workers: 0}
"""
GRPO = """\
rewards: [{name: iou}]
rollout: {group_size: 4, max_new_tokens: 12}
"""
END = """\
optim: {lr: 1e-5, prompts_per_step: 2}
train: {steps: 1}
output: runs/NAME
"""
REWARDS = '''\
def share(completion, answer):
    """0 / 0 where nothing was said: NaN."""
    said = [word for word in completion.split() if word == "seven"]
    return float("nan") if not said else 1.0


def short(completions, **kwargs):
    """TRL's first example, which is for texts."""
    return [-abs(20 - len(completion)) for completion in completions]


def graded(completion, answer):
    """The form of another framework: a dict of scores."""
    return {"overall": 1.0, "format": 0.0}
'''
QUESTION = "<image>Where is the seven?"
SAID = "[100, 200, 400, 500]"


def write_inputs(folder: Path) -> None:
    """Write recipes, rows, pictures, checkpoints and adapters into a folder."""
    (folder / "images").mkdir(parents=True)
    Image.new("RGB", (597, 640), (90, 120, 200)).save(folder / "images/0.png")
    whole = (folder / "images/0.png").read_bytes()
    (folder / "images/cut.png").write_bytes(whole[: len(whole) // 2])
    drawn = Image.new("RGBA", (597, 640), (0, 0, 0, 0))
    drawn.paste((255, 255, 255, 255), (100, 200, 400, 500))
    drawn.save(folder / "images/white.png")
    (folder / "grpo.yaml").write_text(RECIPE + GRPO + END.replace("NAME", "grpo"))
    (folder / "sft.yaml").write_text(RECIPE + END.replace("NAME", "sft"))
    (folder / "rewards.py").write_text(REWARDS)
    write_rows(folder)
    shutil.copytree(START, folder / "model")
    write_holed_model(folder)
    write_adapters(folder)


def write_rows(folder: Path) -> None:
    """Write rows whose box, picture or right answer does not fit in one way each, and rows.jsonl, whose all do."""
    box = [100, 200, 400, 500]
    files: Mapping[str, Sequence[dict[str, Any]]] = {
        "rows": [row(box)] * 4,
        "thousandths": [row([168, 313, 990, 781])] * 4,
        "shares": [row([0.17, 0.31, 0.67, 0.78])] * 4,
        "marks": [row(box, question="<image><image>Where is the seven?")] * 4,
        "foreign": [row(box, question="<image 1>Where is the seven?")] * 4,
        "rendered": [row(box, question="[INST] Where is the seven? [/INST]")] * 4,
        "ended": [row(box, said="It is there.</s>")] * 4,
        "fractions": [row(box, said="[0.17, 0.31, 0.67, 0.78]")] * 4,
        "white": [row(box, picture="white.png")] * 4,
        "elsewhere": [{"question": "Where is the seven?", "answer": "There.", "image_path": "0.png"}] * 4,
        "cut": [row(box, picture="cut.png")] * 4,
        "formulas": [row(r"\frac{3}{")] * 4,
    }
    for name, rows in files.items():
        lines = [json.dumps({"id": f"{name}-{number}", **each}) + "\n" for number, each in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def row(answer: Any, *, question: str = QUESTION, said: str = SAID, picture: str = "0.png") -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return {"images": [picture], "answer": answer, "messages": turns}


def write_holed_model(folder: Path) -> None:
    """Write a checkpoint that lacks the weights of a layer, as one whose shard was lost."""
    shutil.copytree(START, folder / "holed")
    weights = load_file(folder / "holed/model.safetensors")
    save_file(
        {name: tensor.clone() for name, tensor in weights.items() if "layers.1." not in name},
        folder / "holed/model.safetensors",
        metadata={"format": "pt"},
    )


def write_adapters(folder: Path) -> None:
    """Write an adapter with names of before transformers 4.52, one that lacks half of its weights, and one whose file
    has the model's embeddings too, as PEFT saves them where tokens were added."""
    shapes = {"lora_A": (RANK, WIDTH), "lora_B": (WIDTH, RANK)}
    weights = {
        f"base_model.model.model.language_model.layers.{layer}.self_attn.q_proj.{name}.weight": torch.full(shape, 0.01)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    old = {name.replace("model.language_model.layers", "model.layers"): tensor for name, tensor in weights.items()}
    half = {name: tensor for name, tensor in weights.items() if "layers.2." not in name}
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    whole = weights | {"base_model.model.model.language_model.embed_tokens.weight": torch.ones(8, WIDTH)}
    for name, kept in (("old", old), ("half", half), ("whole", whole)):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(kept, folder / name / "adapter_model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write_inputs(Path(sys.argv[1]))
