"""The run of `tiercel demo --real` by TRL: python -m benchmarks.drivers.trl_real --model DIR --rows FILE --out DIR \\
--steps 50 --seed 0"""

from typing import Any

import torch
from datasets import Dataset, Image
from peft import LoraConfig
from transformers import AutoProcessor, LlavaForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.drivers.measuring import LORA_TARGETS
from benchmarks.drivers.real_task import (
    COMPLETION_TOKENS,
    GROUP_SIZE,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    PROMPTS_PER_STEP,
    SAVE_EVERY,
    WARMUP_STEPS,
    RealTask,
    StepLog,
    exact,
    parse_real_task,
)


class LoggedSteps(TrainerCallback):
    """Tells the log where steps begin and end."""

    def __init__(self, log: StepLog):
        self.log = log

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self.log.begin()

    def on_step_end(self, args: Any, state: Any, *arguments: Any, **options: Any) -> None:
        self.log.end_step(state.global_step)


def make_config(task: RealTask) -> GRPOConfig:
    """Return the config of the recipe: float32, no KL penalty, one update for each rollout."""
    return GRPOConfig(
        output_dir=str(task.out),
        seed=task.seed,
        per_device_train_batch_size=GROUP_SIZE * PROMPTS_PER_STEP,
        num_generations=GROUP_SIZE,
        gradient_accumulation_steps=1,
        max_completion_length=COMPLETION_TOKENS,
        max_steps=task.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP_STEPS,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        dataloader_num_workers=0,
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_steps=SAVE_EVERY,
        save_only_model=True,
        disable_tqdm=True,
    )


def make_dataset(task: RealTask) -> Dataset:
    """Return the rows; the template writes the picture before the text."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"\n{row['question']}"}],
            "image": row["picture"],
            "answer": row["answer"],
        }
        for row in task.read_rows()
    ]
    return Dataset.from_list(rows).cast_column("image", Image())


def main() -> None:
    task = parse_real_task(__doc__)
    task.out.mkdir(parents=True, exist_ok=True)
    log = StepLog(file=task.out / "steps.jsonl")

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        rewards = exact([turns[0]["content"] for turns in completions], answer)
        log.rewards += rewards
        return rewards

    GRPOTrainer(
        model=LlavaForConditionalGeneration.from_pretrained(task.model, dtype=torch.float32),
        reward_funcs=reward,
        args=make_config(task),
        train_dataset=make_dataset(task),
        processing_class=AutoProcessor.from_pretrained(task.model),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_TARGETS),
        callbacks=[LoggedSteps(log)],
    ).train()


if __name__ == "__main__":
    main()
