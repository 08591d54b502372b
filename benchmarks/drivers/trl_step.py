"""GRPO steps of TRL, one after the other: a new image, a rollout by transformers' generation, an update.

    python -m benchmarks.drivers.trl_step --model DIR --images DIR --scratch DIR \\
        --completion-tokens 64 --group-size 8 --warmup 1 --steps 5
"""

from typing import Any

import torch
from datasets import Dataset, Image
from peft import LoraConfig
from transformers import AutoProcessor, GenerationConfig, Qwen2_5_VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.drivers.measuring import (
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    LORA_TARGETS,
    SYSTEM,
    Measurement,
    StepClock,
    Task,
    answer_stream,
    installed,
    parse_task,
    peak_bytes,
    random_rewards,
    write_answer,
)


class ClockedTrainer(GRPOTrainer):
    """TRL's trainer with the rollout and the policy pass timed. It remembers the lengths of what it trained on."""

    def __init__(self, clock: StepClock, **options: Any):
        self.clock = clock
        self.completion_tokens: list[int] = []  # of every completion so far
        self.prompt_tokens = 0
        super().__init__(**options)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        with self.clock.phase("rollout"):
            batch = super()._generate_and_score_completions(inputs)
        self.completion_tokens += batch["completion_mask"].sum(1).tolist()
        self.prompt_tokens = int(batch["prompt_mask"].sum(1).max())
        return batch

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with self.clock.phase("learn"):  # the rollout is called in here, and is a phase of its own
            return super().training_step(*arguments, **options)


class StepEnds(TrainerCallback):
    """Tells the clock when a step ends, and keeps the norms of the gradient."""

    def __init__(self, clock: StepClock):
        self.clock = clock
        self.gradient_norms: list[float] = []

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        self.clock.end_step()  # loading is not a step

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.clock.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "grad_norm" in logs:
            self.gradient_norms.append(float(logs["grad_norm"]))


def make_config(task: Task) -> GRPOConfig:
    """Return the config: the questions of one image per step, a group at a time, one update per rollout,
    float32, no checkpointing, no KL penalty, no old-policy pass."""
    suppressed = GenerationConfig.from_pretrained(task.model).suppress_tokens
    return GRPOConfig(
        output_dir=str(task.scratch / "trl"),
        per_device_train_batch_size=task.group_size,
        num_generations=task.group_size,
        gradient_accumulation_steps=task.questions,
        max_completion_length=task.completion_tokens,
        generation_kwargs={"suppress_tokens": suppressed},
        max_steps=task.all_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
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
        save_strategy="no",
        disable_tqdm=True,
    )


def make_dataset(task: Task) -> Dataset:
    """Return a row for each question of each step's image; a file is decoded when its row is read."""
    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            "image": str(file),
        }
        for file in task.image_files()
        for question in task.question_texts()
    ]
    return Dataset.from_list(rows).cast_column("image", Image())


def measure(task: Task) -> Measurement:
    """Run the task's steps and measure them."""
    clock = StepClock()
    ends = StepEnds(clock)

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return random_rewards(len(clock.steps), len(completions))

    trainer = ClockedTrainer(
        clock,
        model=Qwen2_5_VLForConditionalGeneration.from_pretrained(task.model, dtype=torch.float32),
        reward_funcs=reward,
        args=make_config(task),
        train_dataset=make_dataset(task),
        processing_class=AutoProcessor.from_pretrained(task.model),
        peft_config=LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=LORA_TARGETS),
        callbacks=[ends],
    )
    trainer.train()
    skipped = 1 + task.warmup
    return Measurement(
        versions=installed(("trl", "torch", "transformers", "peft")),
        threads=torch.get_num_threads(),
        trained_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        prompt_tokens=trainer.prompt_tokens,
        completion_tokens=trainer.completion_tokens[task.warmup * task.questions * task.group_size :],
        step_seconds=clock.steps[skipped:],
        phase_seconds=clock.phase_seconds(skipped),
        gradient_norms=ends.gradient_norms[task.warmup :],
        peak_bytes=peak_bytes(),
    )


def main() -> None:
    task = parse_task(__doc__)
    with answer_stream() as stream:
        write_answer(stream, measure(task))


if __name__ == "__main__":
    main()
