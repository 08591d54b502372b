"""GRPO steps of ms-swift, one after the other: a new image, a rollout by transformers' generation, an update.

    python -m benchmarks.drivers.swift_step --model DIR --images DIR --scratch DIR \\
        --completion-tokens 64 --group-size 8 --warmup 1 --steps 5

The checkpoint needs Qwen's own special ids, because they are in ms-swift's source. Suppressed tokens and open sampling
are read from its generation_config.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from swift.arguments import RLHFArguments
from swift.callbacks import TrainerCallback, callbacks_map
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.trainers import TrainerFactory

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

CLOCK = StepClock()  # ms-swift itself makes the trainer, the callback and the reward from their classes


class ClockedTrainer(GRPOTrainer):
    """ms-swift's trainer with rollout, old-policy pass and policy pass timed, which remembers the lengths it trained
    on."""

    def __init__(self, *arguments: Any, **options: Any):
        self.completion_tokens: list[int] = []  # of every completion so far
        self.prompt_tokens = 0
        self.gradient_norms: list[float] = []
        super().__init__(*arguments, **options)

    def _generate_and_score_completions(self, inputs: Any) -> list[dict[str, Any]]:
        with CLOCK.phase("rollout"):
            batches = super()._generate_and_score_completions(inputs)
        for batch in batches:
            completion_tokens = batch["grpo_batch"].completion_mask.sum(1)
            all_tokens = batch["model_inputs"]["attention_mask"].sum(1)
            self.completion_tokens += completion_tokens.tolist()
            self.prompt_tokens = int((all_tokens - completion_tokens).max())
        return batches

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        with CLOCK.phase("learn" if torch.is_grad_enabled() else "old"):
            return super()._get_per_token_logps_and_entropies(*arguments, **options)

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        with CLOCK.phase("learn"):  # the rollout is called in here, and is a phase of its own
            return super().training_step(*arguments, **options)


class StepEnds(TrainerCallback):
    """Tells the clock when a step ends, and keeps the norms of the gradient."""

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        CLOCK.end_step()  # loading is not a step

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        CLOCK.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
        if logs and "grad_norm" in logs:
            self.trainer.gradient_norms.append(float(logs["grad_norm"]))


class RandomReward(ORM):
    """Returns numbers that do not depend on the completion."""

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return random_rewards(len(CLOCK.steps), len(completions))


class Pipeline(SwiftRLHF):
    """ms-swift's own pipeline, which keeps the trainer."""

    trainer: ClockedTrainer

    def train(self, trainer: ClockedTrainer) -> Any:
        self.trainer = trainer
        return super().train(trainer)


def write_rows(task: Task) -> Path:
    """Write ms-swift's JSONL, with a row for each question of each step's image."""
    rows = [
        {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"<image>{question}"}],
            "images": [str(file.resolve())],
        }
        for file in task.image_files()
        for question in task.question_texts()
    ]
    file = task.scratch / "swift-rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_arguments(task: Task) -> RLHFArguments:
    """Return the arguments: the questions of one image per step, a group at a time, one update per
    rollout, float32, no checkpointing, no KL penalty."""
    return RLHFArguments(
        rlhf_type="grpo",
        model=str(task.model),
        use_hf=True,  # the other hub is asked even for a local directory
        model_type="qwen2_5_vl",
        template="qwen2_5_vl",
        dataset=[str(write_rows(task))],
        dataset_shuffle=False,
        train_dataloader_shuffle=False,
        load_from_cache_file=False,
        split_dataset_ratio=0,
        reward_funcs=["random"],
        callbacks=["step_ends"],
        tuner_type="lora",
        lora_rank=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        lora_dropout=0.0,
        target_regex=LORA_TARGETS,
        torch_dtype="float32",
        bf16=False,
        fp16=False,
        attn_impl="sdpa",
        use_cpu=True,
        num_generations=task.group_size,
        per_device_train_batch_size=task.group_size,
        gradient_accumulation_steps=task.questions,
        max_completion_length=task.completion_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        beta=0.0,
        use_vllm=False,
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        max_steps=task.all_steps,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="no",
        report_to=["none"],
        dataloader_num_workers=0,
        dataset_num_proc=1,
        output_dir=str(task.scratch / "swift"),
    )


def measure(task: Task) -> Measurement:
    """Run the task's steps and measure them."""
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{ClockedTrainer.__name__}"
    callbacks_map["step_ends"] = StepEnds
    orms["random"] = RandomReward
    pipeline = Pipeline(make_arguments(task))
    pipeline.main()
    trainer = pipeline.trainer
    skipped = 1 + task.warmup
    return Measurement(
        versions=installed(("ms-swift", "torch", "transformers", "peft", "trl")),
        threads=torch.get_num_threads(),
        trained_parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        prompt_tokens=trainer.prompt_tokens,
        completion_tokens=trainer.completion_tokens[task.warmup * task.questions * task.group_size :],
        step_seconds=CLOCK.steps[skipped:],
        phase_seconds=CLOCK.phase_seconds(skipped),
        gradient_norms=trainer.gradient_norms[task.warmup :],
        peak_bytes=peak_bytes(),
    )


def main() -> None:
    task = parse_task(__doc__)
    with answer_stream() as stream:
        write_answer(stream, measure(task))


if __name__ == "__main__":
    main()
