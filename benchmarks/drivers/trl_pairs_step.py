"""Updates of TRL's DPOTrainer from rows of pairs with a picture.

    python -m benchmarks.drivers.trl_pairs_step --model DIR --rows F.jsonl --scratch DIR --warmup 1 --steps 3

The rows are tiercel's, and a step is a batch of one pair. The trainer's work on the data before its first step is not
timed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Image, Value
from peft import LoraConfig
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration, TrainerCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.drivers.measuring import (
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    StepClock,
    answer_stream,
    installed,
    peak_bytes,
)


class StepEnds(TrainerCallback):
    """Tells the clock when a step ends, and keeps the losses."""

    def __init__(self, clock: StepClock):
        self.clock = clock
        self.losses: list[float] = []

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self.clock.end_step()  # loading is not a step

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.clock.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def make_dataset(rows: Path) -> Dataset:
    """Return conversations, with images as files that are decoded when a row is read."""
    records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    made = []
    for record in records:
        system, user, answer = (turn["content"] for turn in record["messages"])
        prompt = [
            {"role": "system", "content": system},
            {"role": "user", "content": user.replace("<image>", "")},
        ]
        made.append(
            {
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": answer}],
                "rejected": [{"role": "assistant", "content": record["rejected"]}],
                "images": [str(rows.parent / record["images"][0])],
            }
        )
    turns = [{"role": Value("string"), "content": Value("string")}]
    features = Features({"prompt": turns, "chosen": turns, "rejected": turns, "images": [Image()]})
    return Dataset.from_list(made, features=features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "rows", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args()
    with answer_stream() as stream:
        clock = StepClock()
        ends = StepEnds(clock)
        trainer = DPOTrainer(
            model=Qwen2_5_VLForConditionalGeneration.from_pretrained(task.model, dtype=torch.float32),
            args=DPOConfig(
                output_dir=str(task.scratch / "trl"),
                per_device_train_batch_size=1,
                gradient_accumulation_steps=1,
                max_steps=task.warmup + task.steps,
                max_length=None,
                beta=0.1,
                loss_type="sigmoid",
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                dataloader_num_workers=0,
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=make_dataset(task.rows),
            processing_class=AutoProcessor.from_pretrained(task.model),
            peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_TARGETS),
            callbacks=[ends],
        )
        trainer.train()
        answer = {
            "seconds": clock.steps[1 + task.warmup :],
            "losses": ends.losses,
            "peak_bytes": peak_bytes(),
            "versions": installed(("trl", "torch", "transformers", "peft")),
        }
        stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
