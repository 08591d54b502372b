"""Forward and backward passes over rows that begin alike: as a tree, with prompts shared only, or by transformers.

    python -m benchmarks.drivers.tree_step --by tree --model DIR --images F.png --workload rec --warmup 1 --steps 3

All give the gradient of the same loss of the same random tokens; the vision pass is on the clock. `prompt` is tiercel
as it was before trees: each prompt is computed once for its completions. Microbatches have at most --budget tokens.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.drivers.learner_step import TEXT_IDS, make_policy, make_prompt
from benchmarks.drivers.measuring import answer_stream, peak_bytes
from benchmarks.random_trees import row_of
from tests.models.test_families import huggingface_inputs
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.batch import units_of
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import PackItem, pack
from tiercel.types import EncodedPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Questions of one picture, and completions of each, some of which begin alike."""

    title: str
    side: int  # of the picture, in pixels
    questions: int
    question_tokens: int
    completions: int  # of each question
    tokens: int  # of a completion
    beginnings: int = 0  # different ones that the completions have; 0: they share nothing
    shared: int = 0  # tokens of such a beginning


WORKLOADS = {
    "rec": Workload(
        title="7 expressions, 8 completions of 30", side=896, questions=7, question_tokens=30, completions=8, tokens=30
    ),
    "vqa": Workload(
        title="10 questions, 8 completions of 4", side=896, questions=10, question_tokens=12, completions=8, tokens=4
    ),
    "small": Workload(
        title="10 questions of a small picture, 8 completions of 30",
        side=448,
        questions=10,
        question_tokens=12,
        completions=8,
        tokens=30,
    ),
    "pairs": Workload(
        title="a pair that shares 60 % of its answers",
        side=896,
        questions=1,
        question_tokens=30,
        completions=2,
        tokens=200,
        beginnings=1,
        shared=120,
    ),
    "forks": Workload(
        title="8 trajectories that fork at turn two",
        side=448,
        questions=1,
        question_tokens=30,
        completions=8,
        tokens=300,
        beginnings=2,
        shared=150,
    ),
}


def make_items(policy: Policy, start: EncodedPrompt, load: Workload) -> list[PackItem]:
    """Make the rows, with random text."""
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> Tensor:
        return torch.randint(TEXT_IDS, (count,), generator=generator)

    items = []
    for index in range(load.questions):
        asked_L = words(load.question_tokens)
        beginnings = [words(load.shared) for _ in range(load.beginnings)] or [words(0)]
        answers = [
            torch.cat([beginnings[number % len(beginnings)], words(load.tokens - load.shared)])
            for number in range(load.completions)
        ]
        items.append(row_of(start, index, asked_L, answers))
    return items


def packed_passes(
    policy: Policy, items: Sequence[PackItem], budget: int, is_tree: bool
) -> Iterator[Callable[[], Tensor]]:
    """Yield the passes over the microbatches; each returns logprobs (N,)."""
    learner, family = PackedPolicy(policy, "split", False), policy.family if is_tree else None
    numbers = iter(range(sum(len(item.continuations) for item in items)))
    entries = [("", [next(numbers) for _ in item.continuations]) for item in items]
    for unit in units_of(pack(items, family), entries, "split", budget, False, lambda packed, _: packed):
        (packed,) = unit.batches

        def compute(packed=packed) -> Tensor:
            return learner(packed, VisionStore(policy, 0).features(packed.images), 1.0).logprobs_N

        yield compute


def plain_passes(policy: Policy, items: Sequence[PackItem]) -> Iterator[Callable[[], Tensor]]:
    """Yield a pass for each question by transformers' own forward, with prompt and picture repeated."""
    for item in items:
        ids_GL = torch.stack([torch.cat([item.prompt.token_ids_P, each.token_ids_L]) for each in item.continuations])
        pictures = [image.views[0].permute(2, 0, 1) for image in item.prompt.images]
        one = huggingface_inputs(policy.family, item.prompt, ids_GL[0], pictures)
        inputs = {name: value.repeat(len(ids_GL), *[1] * (value.ndim - 1)) for name, value in one.items()}
        length = len(item.continuations[0].token_ids_L)
        inputs |= {"input_ids": ids_GL, "logits_to_keep": length + 1}

        def compute(inputs=inputs, ids_GL=ids_GL, length=length) -> Tensor:
            logits = policy.model(**inputs).logits[:, :-1].float()
            return logits.log_softmax(-1).gather(2, ids_GL[:, -length:, None]).flatten()

        yield compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("tree", "prompt", "plain"), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--images", type=Path, nargs="+", required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    for name in ("budget", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args()
    with answer_stream() as stream:
        torch.manual_seed(0)
        policy = make_policy(task.model)
        load = WORKLOADS[task.workload]
        items = make_items(policy, make_prompt(policy, task.images, 0), load)
        if task.by == "plain":
            passes = list(plain_passes(policy, items))
        else:
            passes = list(packed_passes(policy, items, task.budget, task.by == "tree"))
        advantages_C = torch.randn(load.questions * load.completions)
        loaded, seconds, every = peak_bytes(), [], []
        for _ in range(task.warmup + task.steps):
            policy.model.zero_grad()
            start, first, every = time.perf_counter(), 0, []
            for compute in passes:
                logprobs_N = compute()
                weights_N = advantages_C[first : first + len(logprobs_N) // load.tokens].repeat_interleave(load.tokens)
                first += len(logprobs_N) // load.tokens
                (-((logprobs_N - logprobs_N.detach()).exp() * weights_N).sum() / len(advantages_C)).backward()
                every.append(logprobs_N.detach())
            seconds.append(time.perf_counter() - start)
        gradient = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values() if p.grad is not None])
        answer = {
            "seconds": seconds[task.warmup :],
            "peak_bytes": peak_bytes(),
            "loaded_bytes": loaded,
            "gradient_norm": float(gradient.norm()),
            "logprob_mean": float(torch.cat(every).mean()),
            "tokens": {
                "repeated": sum(item.repeated_length for item in items),
                "prompt": sum(item.shared_length for item in items),
                "tree": pack(items, policy.family).tree.length,
            },
        }
        stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
