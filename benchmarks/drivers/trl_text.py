"""A run of benchmarks.real_text by TRL: python -m benchmarks.drivers.trl_text --method grpo --model DIR --rows FILE \\
--out DIR --steps 40 --seed 0"""

import json
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.drivers.real_task import exact
from benchmarks.drivers.text_task import (
    COMPLETION_TOKENS,
    DPO_BETA,
    GROUP_SIZE,
    LEARNING_RATES,
    LORA_ALPHA,
    LORA_RANK,
    ROWS_PER_STEP,
    SAVE_EVERY,
    WARMUP_STEPS,
    TextTask,
    parse_text_task,
)

# The linear layers of the decoder.
LORA_TARGETS = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


class LossLog(TrainerCallback):
    """Writes the loss and the reward of each step, where there is one, into steps.jsonl."""

    def __init__(self, task: TextTask):
        self.task = task

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "loss" in logs:
            row = {"step": state.global_step, "loss": float(logs["loss"]), "reward": logs.get("reward")}
            with open(self.task.out / "steps.jsonl", "a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


def common(task: TextTask) -> dict[str, Any]:
    """Return the arguments that all methods share: float32, the recipe's rate and schedule."""
    is_sampled = task.method == "grpo"
    return {
        "output_dir": str(task.out),
        "seed": task.seed,
        "per_device_train_batch_size": ROWS_PER_STEP[task.method] * (GROUP_SIZE if is_sampled else 1),
        "gradient_accumulation_steps": 1,
        "max_steps": task.steps,
        "learning_rate": LEARNING_RATES[task.method],
        "lr_scheduler_type": "linear",
        "warmup_steps": WARMUP_STEPS,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "report_to": [],
        "save_steps": SAVE_EVERY,
        "save_only_model": True,
        "disable_tqdm": True,
    }


def asked(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def in_order(trainer: type) -> type:
    """Return a trainer that takes the rows in the order of their file."""

    class InOrder(trainer):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def by_sft(task: TextTask, parts: dict[str, Any]) -> Any:
    rows = [{"prompt": asked(row), "completion": said(row["answer"])} for row in task.rows_of_steps()]
    config = SFTConfig(**common(task), max_length=None, packing=False)
    return in_order(SFTTrainer)(**parts, args=config, train_dataset=Dataset.from_list(rows))


def by_dpo(task: TextTask, parts: dict[str, Any]) -> Any:
    rows = [
        {"prompt": asked(row), "chosen": said(row["answer"]), "rejected": said(row["wrong"])}
        for row in task.rows_of_steps()
    ]
    config = DPOConfig(**common(task), max_length=None, beta=DPO_BETA, loss_type="sigmoid")
    return in_order(DPOTrainer)(**parts, args=config, train_dataset=Dataset.from_list(rows))


def by_grpo(task: TextTask, parts: dict[str, Any]) -> Any:
    rows = [{"prompt": asked(row), "answer": row["answer"]} for row in task.rows_of_steps()]

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        return exact([turns[0]["content"] for turns in completions], answer)

    config = GRPOConfig(
        **common(task),
        num_generations=GROUP_SIZE,
        max_completion_length=COMPLETION_TOKENS,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        shuffle_dataset=False,
    )
    return GRPOTrainer(**parts, args=config, train_dataset=Dataset.from_list(rows), reward_funcs=reward)


METHODS: dict[str, Callable[[TextTask, dict[str, Any]], Any]] = {"sft": by_sft, "dpo": by_dpo, "grpo": by_grpo}


def main() -> None:
    task = parse_text_task(__doc__)
    task.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "model": AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        "processing_class": AutoTokenizer.from_pretrained(task.model),
        "peft_config": LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_TARGETS),
        "callbacks": [LossLog(task)],
    }
    METHODS[task.method](task, parts).train()


if __name__ == "__main__":
    main()
