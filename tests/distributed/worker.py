"""One rank of the tests of strategies, started by torch's launcher.

    torchrun --nproc-per-node 2 -m tests.distributed.worker arrangements --strategy fsdp2 --checkpoints DIR --rows FILE

`equal` makes updates on recorded rollouts and keeps their gradients; `arrangements` samples and learns from every pair
of kinds of rows on two ranks, and with ranks that have nothing.
"""

import argparse
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests.tiny_models import FAMILY_NAMES
from tests.training.test_loops import grpo_recipe, sft_recipe
from tiercel.config import DpoRecipe, GrpoRecipe, KtoRecipe, RewardRecipe, SftRecipe
from tiercel.data.encoding import ExampleEncoder, prompt_encoder
from tiercel.data.order import RowOrder, rank_slice
from tiercel.data.reading import read_rows
from tiercel.distributed.launch import leave
from tiercel.distributed.ranks import Ranks, joined_ranks
from tiercel.models.families.base import Family
from tiercel.packing.batch import advantage_groups
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import sampling_params
from tiercel.training.grpo.advantages import step_advantages
from tiercel.training.grpo.engine_logprob_check import trainer_logprobs
from tiercel.training.grpo.minibatch_updates import learn
from tiercel.training.offline.example_loss import example_update
from tiercel.training.offline.objectives import objective_of
from tiercel.training.rank_balancing import grouped_by_rank
from tiercel.training.trainer import Trainer, build_trainer
from tiercel.types import Completion, EncodedPrompt, Example, Group, Message, Row, ScoredCompletion, ScoredGroup

STEPS = 3
PROMPTS = 4
TIMEOUT_SECONDS = 180.0  # a hang fails after this time; a busy machine does not
KINDS = {"text": 0, "image": 1, "images": 2}  # numbers of rows that `write_rows` makes of this kind
STRATEGIES = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp2": {"strategy": "fsdp2"},
    "hsdp": {"strategy": "fsdp2", "shard_size": 2},
    "context 2": {"strategy": "ddp", "context_parallel": 2},
    "context 4": {"strategy": "ddp", "context_parallel": 4},
    "context 2, fsdp2": {"strategy": "fsdp2", "context_parallel": 2},
    "context 2, zero3": {"strategy": "deepspeed", "context_parallel": 2},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"stage": 2}},
    "zero3": {"strategy": "deepspeed"},
    "zero3-offload": {
        "strategy": "deepspeed",
        "deepspeed": {"offload_parameters": True, "offload_optimizer": True},
    },
}
SAMPLED = ("grpo", "taught", "one picture")
SYSTEM = "Look at the picture for as long as you want, and then say what there is to be said of it. " * 2
OFFLINE = {
    "dpo": (DpoRecipe, {"dpo": {"loss": "mpo", "beta": 0.5}}),
    "aot": (DpoRecipe, {"dpo": {"loss": "aot", "beta": 0.5, "ld_alpha": 0.5}}),
    "aot unpaired": (DpoRecipe, {"dpo": {"loss": "aot_unpaired", "beta": 0.5}}),
    "kto": (KtoRecipe, {"kto": {"beta": 0.5}}),
    "noise": (SftRecipe, {"sft": {"neftune_alpha": 20, "label_smoothing": 0.1}}),
    "reward": (RewardRecipe, {"ranking": {"centre_coef": 0.1}}),
}
VIDEOS = {"max_prompt_tokens": 400, "video": {"min_pixels": 3136, "max_pixels": 7000}}
TRAINED = {
    "adapter": {},
    "adapter, recomputed in part": {
        "learner": {"gradient_checkpointing": "selective", "max_tokens_per_microbatch": 160}
    },
    "adapter, videos": {"data": VIDEOS, "learner": {"max_tokens_per_microbatch": 500}},
    "adapter of the tower, videos": {
        "data": VIDEOS,
        "learner": {"max_tokens_per_microbatch": 500},
        "lora": {"rank": 4, "alpha": 8, "targets": "vision"},
    },
    "adapter of the tower": {"lora": {"rank": 4, "alpha": 8, "targets": "vision"}},
    "adapter on 4 bits": {"model": {"quantize": "nf4"}, "lora": {"rank": 4, "alpha": 8, "start": "loftq"}},
    "lengths too": {"lora": {"rank": 4, "alpha": 8, "kind": "dora"}},
    "language": {"lora": None, "freeze": ["vision", "projector"]},
    "all": {"lora": None, "freeze": []},
    "all, with a penalty": {"lora": None, "freeze": [], "algorithm": {"kl": {"coef": 0.5}}},
    # Adam makes as large a step for a gradient that is all rounding as for any other: at 1e-3 the weights diverge on
    # some processors.
    "adapter, tower whole": {"freeze": [], "algorithm": {"kl": {"coef": 0.5}}, "optim": {"lr": 1e-4}},
}


def recorded_group(prompt: EncodedPrompt, family: Family, step: int, *, size: int = 3) -> ScoredGroup:
    """A group with random completions and rewards: a function of (step, prompt) and nothing else."""
    draws = random.Random(1000 * step + prompt.index)
    words = [i for i in range(family.vocabulary_size) if i not in family.placeholder_ids]
    completions = []
    for number in range(size):
        ids = [draws.choice(words) for _ in range(draws.randint(1, 9))]
        completion = Completion(
            token_ids_L=torch.tensor(ids),
            logprobs_L=torch.tensor([-draws.random() for _ in ids]),
            text="",
            is_truncated=False,
            seed=number,
        )
        completions.append(ScoredCompletion(completion=completion, rewards={}, total=draws.random(), is_correct=None))
    return scored_group(prompt, completions)


def scored_group(prompt: EncodedPrompt, completions: Sequence[ScoredCompletion]) -> ScoredGroup:
    group = Group(prompt=prompt, completions=tuple(c.completion for c in completions), policy_version=0)
    return ScoredGroup(group=group, completions=tuple(completions))


def keep_gradients(trainer: Trainer) -> list[torch.Tensor]:
    """The flat gradient of every update from now on, before clipping; on the first rank."""
    kept: list[torch.Tensor] = []
    update = trainer.strategy.update

    def recording(norm: float, max_norm: float) -> bool:
        gradients = trainer.strategy.gradients()
        if gradients:
            kept.append(torch.cat([gradients[name].flatten().float() for name in sorted(gradients)]))
        return update(norm, max_norm)

    trainer.strategy.update = recording  # type: ignore[method-assign]
    return kept


def require_share(trainer: Trainer, ranks: Ranks) -> None:
    """A strategy that shards, does: what is called one is not whole everywhere."""
    with trainer.strategy.whole_policy():
        pass  # and release it again
    weights = [
        p for p in trainer.policy.family.language_model(trainer.policy.model).parameters() if not p.requires_grad
    ]
    held = sum(_held(weight) for weight in weights)
    whole = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)
    copies = getattr(trainer.strategy, "copies", 1)
    share = 1.0 if trainer.strategy.passes_are_private else copies / ranks.world_size
    assert abs(held / whole - share) < 0.05, f"{held} of {whole} weights are on rank {ranks.rank}"


def require_moved(trainer: Trainer, recipe: GrpoRecipe, example: EncodedPrompt | Example) -> None:
    """Trained weights are moved for a while, for saving and for passes alike, and put back bit by bit."""
    prompt = example if isinstance(example, EncodedPrompt) else example.prompt
    group = recorded_group(prompt, trainer.policy.family, 0).group

    def seen() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        weights = {name: weight.clone() for name, weight in trainer.strategy.trained_weights().items()}
        return weights, trainer_logprobs(trainer, [group])[0]

    weights, logprobs = seen()
    with trainer.strategy.moved(lambda weight: weight + 0.1):
        moved_weights, moved_logprobs = seen()
    weights_after, logprobs_after = seen()
    assert float((moved_logprobs - logprobs).abs().max()) > 1e-3
    torch.testing.assert_close(logprobs_after, logprobs)
    for name, weight in weights.items():  # on the first rank
        torch.testing.assert_close(moved_weights[name], weight + 0.1)
        assert torch.equal(weights_after[name], weight)


def _held(weight: torch.Tensor) -> int:
    if isinstance(weight, DTensor):
        return weight.to_local().numel()
    return weight.ds_tensor.numel() if hasattr(weight, "ds_tensor") else weight.numel()


def kinds_of(family_name: str, trained: str) -> tuple[str, ...]:
    """Return what is learnt: for one family also from pairs, labels and a teacher, if the reference can be computed."""
    more = (*OFFLINE, "taught", "one picture") if family_name == "qwen2_5_vl" and trained in ("adapter", "all") else ()
    return ("grpo", "sft", *more)


def questions_of_one_picture(rows: Sequence[Row]) -> list[Row]:
    """As many rows that begin alike, with the picture of one of them: a prefix tree of four prompts in each step."""
    first = rows[KINDS["image"]]
    system = Message(role="system", content=SYSTEM)
    asked = [replace(first.messages[0], content=f"<image>{number}?") for number in range(len(rows))]
    return [replace(first, messages=(system, question, *first.messages[1:])) for question in asked]


def with_another_answer(row: Row) -> Row:
    """The row as one of a pair, and with a label."""
    wrong = replace(row.messages[-1], content="no, not that")
    return replace(row, rejected=replace(row, messages=(*row.messages[:-1], wrong)), label=len(row.id) % 2 == 0)


def equal_updates(options: argparse.Namespace, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Gradients of every step of both loops for every family."""
    found = {}
    train = {"steps": STEPS, "threads": 1, **STRATEGIES[options.strategy]}
    changes = {"train": train, "optim": {"lr": 1e-3}, "data": {"max_prompt_tokens": 150}}
    changes["learner"] = {"max_tokens_per_microbatch": 160}  # so that a step has several
    changes |= TRAINED[options.trained]
    for family_name in options.families:
        checkpoint = options.checkpoints / family_name
        for kind in kinds_of(family_name, options.trained):
            own = {**changes, "rollout": {"parity_action": "warn"}}  # recorded logprobs are random
            if kind == "taught":
                teacher = {"path": str(checkpoint), "dtype": "float32", "prompt": "{prompt} So?"}
                own["algorithm"] = {**own.get("algorithm", {}), "teacher": teacher}
            if kind == "one picture":  # four prompts are some 300 tokens as a tree, which is cut
                own |= {"data": {"max_prompt_tokens": 250}, "learner": {"max_tokens_per_microbatch": 260}}
            if kind not in SAMPLED:
                own = {key: value for key, value in changes.items() if key != "algorithm"}
            make = grpo_recipe if kind in SAMPLED else sft_recipe
            recipe = make(checkpoint, options.rows, Path("unused"), **own)
            if kind in OFFLINE:
                form, section = OFFLINE[kind]
                tree = {**recipe.model_dump(exclude={"sft"}), **section}
                tree["learner"]["max_tokens_per_microbatch"] = 400  # two answers with the longest prompt
                recipe = form.model_validate(tree)
            trainer = build_trainer(recipe, ranks=ranks)
            family = trainer.policy.family
            rows = [with_another_answer(row) for row in read_rows(str(options.rows), recipe.data, "sft").rows]
            if kind == "one picture":
                rows = questions_of_one_picture(rows)
            if kind in SAMPLED:
                encode = prompt_encoder(family, recipe.data)
            else:
                order = RowOrder(counts=(len(rows),), weights=(1.0,), seed=0, shuffle=False)
                encode = ExampleEncoder(recipe=recipe, family=family, rows=rows, order=order)
            if options.trained == "adapter":
                require_share(trainer, ranks)
            if options.trained == "adapter" and kind != "reward":  # which has no logprobs
                require_moved(trainer, recipe, encode(rows[0], ranks.rank))
            kept = keep_gradients(trainer)
            for step in range(STEPS):
                indices = rank_slice(range(step * PROMPTS, (step + 1) * PROMPTS), ranks.rank, ranks.world_size)
                examples = [encode(rows[index % len(rows)], index) for index in indices]
                if kind in SAMPLED:
                    scored = [recorded_group(prompt, family, step) for prompt in examples]
                    groups = advantage_groups(scored, step_advantages(trainer.ranks, scored, recipe))
                    learn(trainer, trainer.with_teacher_terms(groups), recipe)
                else:
                    objective = objective_of(recipe)
                    plan = objective.prepare(trainer, grouped_by_rank(trainer, examples))
                    example_update(trainer, objective, plan)
                trainer.vision.end_step()
            found |= {f"{family_name}.{kind}.{step}": gradient for step, gradient in enumerate(kept)}
    return found


def require_turns(ranks: Ranks) -> None:
    """What ranks do in turns does not overlap."""

    def act() -> tuple[float, float]:
        started = time.monotonic()
        time.sleep(0.05)
        return started, time.monotonic()

    spans = ranks.all_gather(ranks.in_turns(act))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert (ranks.local_rank, ranks.local_size) == (ranks.rank, ranks.world_size)


def arrangements(options: argparse.Namespace, ranks: Ranks) -> None:
    """Three steps of every pair of kinds of rows, and of ranks without prompts or without a scored token."""
    train = {"steps": STEPS, "threads": 1, **STRATEGIES[options.strategy]}
    rollout = {"group_size": 2, "max_new_tokens": 4}
    recipe = grpo_recipe(
        options.checkpoints / options.families[0], options.rows, Path("unused"), train=train, rollout=rollout
    )
    require_turns(ranks)
    trainer = build_trainer(recipe, ranks=ranks)
    sampler = LocalSampler(trainer.policy, trainer.vision)
    rows = read_rows(str(options.rows), recipe.data, "grpo").rows
    encode = prompt_encoder(trainer.policy.family, recipe.data)
    pairs: list[tuple[tuple[str, ...], ...]] = [((a,), (b,)) for a, b in itertools.product(KINDS, repeat=2)]
    uneven = [
        (("image", "text", "images"), ()),
        ((), ("images",)),
        (("text",), ("masked",)),
        (("masked",), ("masked",)),
    ]
    for arrangement in [*pairs, *uneven]:
        for _step in range(3):
            kinds = arrangement[ranks.rank]
            prompts = [encode(rows[KINDS.get(kind, 1)], place + 10 * ranks.rank) for place, kind in enumerate(kinds)]
            with trainer.strategy.whole_policy():
                groups = sampler.sample(prompts, sampling_params(recipe.rollout), list(range(len(prompts))))
            scored = []
            for group, kind in zip(groups, kinds, strict=True):
                totals = [None if kind == "masked" else float(i) for i in range(len(group.completions))]
                completions = [
                    ScoredCompletion(completion=completion, rewards={}, total=total, is_correct=None)
                    for completion, total in zip(group.completions, totals, strict=True)
                ]
                scored.append(scored_group(group.prompt, completions))
            learn(trainer, advantage_groups(scored, step_advantages(trainer.ranks, scored, recipe)), recipe)
            trainer.vision.end_step()
        if ranks.is_first:
            print("learnt from", arrangement, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("equal", "arrangements"))
    parser.add_argument("--strategy", choices=STRATEGIES, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--families", nargs="+", choices=FAMILY_NAMES, default=["qwen2_5_vl"])
    parser.add_argument("--trained", choices=TRAINED, default="adapter")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with joined_ranks(TIMEOUT_SECONDS, Heartbeat(int(os.environ["RANK"]))) as ranks:
        if options.task == "arrangements":
            arrangements(options, ranks)
            return
        found = equal_updates(options, ranks)
        if ranks.is_first:
            save_file(found, options.out)


if __name__ == "__main__":
    main()
    leave(0)
