"""The run of `tiercel demo --real` by ms-swift: python -m benchmarks.drivers.swift_real --model DIR --rows FILE \\
--out DIR --steps 50 --seed 0"""

import json
from pathlib import Path
from typing import Any

from swift.arguments import RLHFArguments
from swift.callbacks import TrainerCallback, callbacks_map
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
from swift.template import TemplateMeta, register_template
from swift.template.templates.llava import LlavaHfTemplate

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

TASK = parse_real_task(__doc__)  # ms-swift itself makes the callback and the reward from their classes
LOG = StepLog(file=TASK.out / "steps.jsonl")


class LoggedSteps(TrainerCallback):
    """Tells the log where steps begin and end."""

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        LOG.begin()

    def on_step_end(self, args: Any, state: Any, *arguments: Any, **options: Any) -> None:
        LOG.end_step(state.global_step)


class ExactReward(ORM):
    """Returns 1 for the answer, word for word."""

    def __call__(self, completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        rewards = exact(completions, answer)
        LOG.rewards += rewards
        return rewards


def write_rows(task: RealTask) -> Path:
    """Write ms-swift's JSONL. Its template writes a newline after the picture."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>{row['question']}"}],
            "images": [row["picture"]],
            "answer": row["answer"],
        }
        for row in task.read_rows()
    ]
    file = task.out / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def with_an_end(trainer: Any, samples: list[Any], outputs: list[Any]) -> list[Any]:
    """Do as ms-swift, and put the token back that ended a completion which is empty otherwise: ms-swift 4.6 ends with a
    RuntimeError at a completion without tokens, and the policy samples some."""
    found = POSTPROCESS(trainer, samples, outputs)
    for sample in found:
        if sample.response_token_ids in (None, [], [[]]):
            sample.response_token_ids = [trainer.template.tokenizer.eos_token_id]
    return found


POSTPROCESS = RolloutTrainerMixin._postprocess_rollout_outputs


def make_arguments(task: RealTask) -> RLHFArguments:
    """Return the arguments of the recipe: float32, no KL penalty, one update for each rollout."""
    return RLHFArguments(
        rlhf_type="grpo",
        model=str(task.model),
        use_hf=True,  # the other hub is asked even for a local directory
        model_type="llava1_5_hf",
        template="real",
        dataset=[str(write_rows(task))],
        dataset_shuffle=False,
        train_dataloader_shuffle=False,
        load_from_cache_file=False,
        split_dataset_ratio=0,
        seed=task.seed,
        reward_funcs=["word_for_word"],
        callbacks=["logged_steps"],
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
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=GROUP_SIZE * PROMPTS_PER_STEP,
        gradient_accumulation_steps=1,
        max_completion_length=COMPLETION_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        loss_type="grpo",
        beta=0.0,
        use_vllm=False,
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP_STEPS,
        weight_decay=0.0,
        adam_beta2=0.999,
        max_steps=task.steps,
        logging_steps=1,
        save_steps=SAVE_EVERY,
        save_only_model=True,
        eval_strategy="no",
        report_to=["none"],
        dataloader_num_workers=0,
        dataset_num_proc=1,
        add_version=False,
        output_dir=str(task.out),
    )


def main() -> None:
    TASK.out.mkdir(parents=True, exist_ok=True)
    register_template(
        TemplateMeta(
            "real",
            prefix=[],
            prompt=["<|im_start|>user\n{{QUERY}}<|im_end|>\n<|im_start|>assistant\n"],
            chat_sep=["<|im_end|>\n"],
            suffix=["<|im_end|>"],
            template_cls=LlavaHfTemplate,
        )
    )
    callbacks_map["logged_steps"] = LoggedSteps
    orms["word_for_word"] = ExactReward
    RolloutTrainerMixin._postprocess_rollout_outputs = with_an_end
    SwiftRLHF(make_arguments(TASK)).main()


if __name__ == "__main__":
    main()
