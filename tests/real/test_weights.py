"""What tiny random weights might hide, on real ones: proof, rounding to 4 and 8 bits, export, ends of turns."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.tiny_models import tiny_recipe
from tiercel.cli.main import main
from tiercel.config.schema import SftRecipe
from tiercel.models.policy import build_policy
from tiercel.packing.forward_equivalence_check import check_forward_equivalence
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import GroupRecord

pytestmark = pytest.mark.real


def test_the_packed_pass_is_that_of_plain_transformers_and_completions_share_their_prompt(model):
    proof = check_forward_equivalence(build_policy(tiny_recipe(model), torch.device("cpu")))
    assert proof.difference < 1e-4 and proof.obstacle is None


def last_evaluation(run: Path) -> list[GroupRecord]:
    file = max((run / "evaluations").iterdir())
    return [GroupRecord.from_json(json.loads(line)) for line in file.read_text().splitlines()]


def test_every_answer_ends_its_turn(trained):
    answers = [group.completions[0] for group in last_evaluation(trained)]
    assert len(answers) == 32 and not any(answer.is_truncated for answer in answers)
    assert read_metrics(trained)[0]["eval/accuracy"] > 0.3  # by chance an answer of the vocabulary is never right


def test_a_merged_export_answers_in_plain_transformers_as_the_run_did(trained, rows, tmp_path):
    assert main(["export", str(trained), "--merge", "--output", str(tmp_path / "model")]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "model", backend="pil")
    shown = {row["id"]: row for row in map(json.loads, rows.read_text().splitlines())}
    for group in last_evaluation(trained):
        row = shown[group.id]
        text = row["messages"][0]["content"].removeprefix("<image>")
        turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        prompt = processor.apply_chat_template([turn], add_generation_prompt=True)
        picture = Image.open(rows.parent / row["images"][0]).convert("RGB")
        inputs = processor(text=prompt, images=picture, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            made = merged.generate(**inputs, do_sample=False, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(made, skip_special_tokens=True) == group.completions[0].text


SHORT = pytest.mark.xfail(strict=True, reason="falls short: 0.8993 against 0.9282 a token over 256 rows")


@pytest.mark.parametrize(("kind", "most"), (pytest.param("int8", 0.02, marks=SHORT), ("nf4", 0.1)))
def test_held_out_loss_of_rounded_weights_is_near_that_of_full_ones(model, many_rows, full_loss, tmp_path, kind, most):
    pytest.importorskip("bitsandbytes")
    loss = held_out_loss(model, many_rows, tmp_path / "run", kind)
    print(f"{kind}: loss {loss:.4f} a token, full {full_loss:.4f}")
    assert abs(loss - full_loss) < most


@pytest.fixture(scope="module")
def full_loss(model, many_rows, tmp_path_factory) -> float:
    return held_out_loss(model, many_rows, tmp_path_factory.mktemp("full") / "run", None)


def held_out_loss(model: Path, rows: Path, output: Path, quantize: str | None) -> float:
    from tests.training.test_loops import run_offline

    tree = {
        "model": {"path": str(model), "dtype": "float32", "quantize": quantize},
        "lora": {"rank": 4, "alpha": 8},
        "data": {"train": str(rows), "eval": str(rows), "workers": 0, "max_prompt_tokens": 128},
        "optim": {"lr": 1e-6, "prompts_per_step": 2},
        "train": {"steps": 1, "threads": 1},
        "output": str(output),
    }
    return read_metrics(run_offline(SftRecipe.model_validate(tree)))[0]["eval/loss"]
