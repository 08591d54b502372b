"""GRPO steps of tiercel, one after the other: a new image, a rollout, an update.

    python -m benchmarks.drivers.tiercel_step --model DIR --images DIR --scratch DIR \\
        --completion-tokens 64 --group-size 8 --warmup 1 --steps 5

Runs what `tiercel grpo` runs, without its loader's worker processes, so decoding and resizing are timed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.drivers.measuring import (
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
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
from tiercel.config.schema import Data, GrpoRecipe, Learner, Lora, Model, Optim, Rollout, Train
from tiercel.data.encoding import prompt_encoder
from tiercel.packing.batch import advantage_groups
from tiercel.rewards.shape import Format
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import sampling_params
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.training.grpo.advantages import step_advantages
from tiercel.training.grpo.minibatch_updates import learn
from tiercel.training.schedule import seed_step
from tiercel.training.session import set_up_numerics
from tiercel.training.trainer import build_trainer
from tiercel.types import Group, ImageRoots, ImageSource, Message, Row, ScoredCompletion, ScoredGroup


class TimedSampler(LocalSampler):
    """The local engine with prefill and decoding timed."""

    clock: StepClock

    def _prefill(self, *arguments: Any, **options: Any) -> Any:
        with self.clock.phase("prefill"):
            return super()._prefill(*arguments, **options)

    def _decode(self, *arguments: Any, **options: Any) -> Any:
        with self.clock.phase("decode"):
            return super()._decode(*arguments, **options)


def make_recipe(task: Task) -> GrpoRecipe:
    """Return the recipe: the questions of one image per step, one update per rollout, float32, no
    checkpointing, no KL penalty."""
    switches = {"skip_zero_advantage": False} if "skip_zero_advantage" in Learner.model_fields else {}
    return GrpoRecipe(
        model=Model(path=str(task.model), dtype="float32"),
        lora=Lora(rank=LORA_RANK, alpha=LORA_ALPHA, targets="language"),
        data=Data(train=str(task.images / "rows.jsonl"), image_root=str(task.images), system=SYSTEM),
        rewards=(Format(),),  # required by the recipe; the driver uses its own numbers
        rollout=Rollout(
            group_size=task.group_size,
            min_new_tokens=task.completion_tokens,
            max_new_tokens=task.completion_tokens,
        ),
        learner=Learner.model_validate(switches),
        optim=Optim(lr=LEARNING_RATE, prompts_per_step=task.questions),
        train=Train(steps=task.all_steps),
        output=str(task.scratch / "tiercel"),
    )


def make_row(file: Path, question: str) -> Row:
    """Return a row with a question about one image."""
    return Row(
        id=f"{file.stem}: {question}",
        messages=(Message(role="user", content=f"<image>{question}"),),
        images=(ImageSource(path=file.name),),
        columns={},
        file="rows.jsonl",
        line=1,
        image_roots=ImageRoots(base=str(file.parent)),
    )


def scored(groups: tuple[Group, ...], step: int) -> list[ScoredGroup]:
    """Return the groups with random rewards for every completion."""
    totals = iter(random_rewards(step, sum(len(group.completions) for group in groups)))
    return [
        ScoredGroup(
            group=group,
            completions=tuple(
                ScoredCompletion(completion=completion, rewards={}, total=next(totals), is_correct=None)
                for completion in group.completions
            ),
        )
        for group in groups
    ]


def timed(clock: StepClock, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as a phase of the clock."""

    def call(*arguments: Any, **options: Any) -> Any:
        with clock.phase(name):
            return function(*arguments, **options)

    return call


def measure(task: Task) -> Measurement:
    """Run the task's steps and measure them."""
    recipe = make_recipe(task)
    set_up_numerics(recipe)
    trainer = build_trainer(recipe)
    clock = StepClock()
    sampler = TimedSampler(trainer.policy, trainer.vision)
    sampler.clock = clock
    trainer.vision.features = timed(clock, "vision", trainer.vision.features)  # type: ignore[method-assign]
    encode = prompt_encoder(trainer.policy.family, recipe.data)
    steps = [[make_row(file, question) for question in task.question_texts()] for file in task.image_files()]
    gradient_norms: list[float] = []
    lengths: list[int] = []
    prompt_tokens = 0
    clock.end_step()  # loading is not a step
    for step, rows in enumerate(steps):
        with clock.phase("preprocess"):
            indices = range(step * task.questions, (step + 1) * task.questions)
            prompts = [encode(row, index) for row, index in zip(rows, indices, strict=True)]
        sampler.load_policy(step, None)
        seeds = [sampling_seed(recipe.train.seed, index) for index in indices]
        groups = sampler.sample(prompts, sampling_params(recipe.rollout), seeds)
        rewarded = scored(groups, step)
        learnable = advantage_groups(rewarded, step_advantages(trainer.ranks, rewarded, recipe))
        seed_step(recipe.train.seed, step, 0)
        with clock.phase("learn"):
            updates = learn(trainer, learnable, recipe).updates
        trainer.vision.end_step()
        clock.end_step()
        if step >= task.warmup:
            gradient_norms += [update.grad_norm for update in updates]
            lengths += [len(completion.token_ids_L) for group in groups for completion in group.completions]
        prompt_tokens = max(len(prompt.token_ids_P) for prompt in prompts)
    skipped = 1 + task.warmup
    return Measurement(
        versions=installed(("tiercel", "torch", "transformers", "peft")),
        threads=torch.get_num_threads(),
        trained_parameters=sum(parameter.numel() for parameter in trainer.strategy.parameters.values()),
        prompt_tokens=prompt_tokens,
        completion_tokens=lengths,
        step_seconds=clock.steps[skipped:],
        phase_seconds=clock.phase_seconds(skipped),
        gradient_norms=gradient_norms,
        peak_bytes=peak_bytes(),
    )


def main() -> None:
    task = parse_task(__doc__)
    with answer_stream() as stream:
        write_answer(stream, measure(task))


if __name__ == "__main__":
    main()
