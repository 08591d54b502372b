"""Updates from rows, by tiercel's own run or by plain transformers: a pair, ten questions of one picture, unlike rows.

    python -m benchmarks.drivers.rows_step --by tiercel --what pair --model DIR --rows F.jsonl --scratch DIR \\
        --warmup 1 --steps 3

tiercel runs what `tiercel dpo` or `tiercel sft` runs: decoding, tokenising and packing are timed. The plain side
prepares its inputs in advance. A pair, all questions of a picture, or eight unlike rows padded to the longest make a
batch. Both sides compute the same loss and update.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.drivers.measuring import LEARNING_RATE, LORA_ALPHA, LORA_RANK, answer_stream, peak_bytes
from tests.models.test_families import huggingface_inputs
from tiercel.config import DpoRecipe, OfflineRecipe, SftRecipe
from tiercel.data.encoding import ExampleEncoder
from tiercel.data.order import file_order
from tiercel.data.reading import read_training_rows
from tiercel.models.policy import Policy, build_policy
from tiercel.runs.directory import open_run, read_metrics
from tiercel.training.offline import loop as offline
from tiercel.training.session import set_up_numerics
from tiercel.types import EncodedConversation

ROWS = {"pair": 1, "questions": 10, "ragged": 8}  # in each step


PADDED = ("input_ids", "attention_mask", "mm_token_type_ids")  # one entry for each token


def make_recipe(task: argparse.Namespace) -> OfflineRecipe:
    """Return the recipe of a run with one step more than asked for, because the last step's checkpoint is not timed."""
    tree: dict[str, Any] = {
        "model": {"path": str(task.model), "dtype": "float32"},
        "lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA},
        "data": {"train": str(task.rows), "workers": 0, "max_prompt_tokens": 4096, "shuffle": False},
        "learner": {"max_tokens_per_microbatch": 16384},
        "optim": {"lr": LEARNING_RATE, "prompts_per_step": ROWS[task.what]},
        "train": {"steps": task.warmup + task.steps + 1, "save_every": 1000},
        "output": str(task.scratch / f"run-{time.time_ns()}"),
    }
    if task.what == "pair":
        return DpoRecipe.model_validate({**tree, "dpo": {"loss": "sigmoid", "beta": 0.1}})
    tree["data"]["group_by_prefix"] = task.what == "questions"
    return SftRecipe.model_validate(tree)


def tiercel_steps(recipe: OfflineRecipe, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds from the end of one step to that of the next, and the steps' losses."""
    ends, honest = [time.perf_counter()], offline.one_step

    def clocked(*inputs: Any) -> None:
        honest(*inputs)
        ends.append(time.perf_counter())

    offline.one_step = clocked
    with open_run(recipe) as run:
        offline.train(recipe, run)
    seconds = [end - start for start, end in pairwise(ends)]
    return seconds[:count], [row["loss"] for row in read_metrics(run.path) if "loss" in row][:count]


def plain_steps(recipe: OfflineRecipe, count: int) -> tuple[list[float], list[float]]:
    """Return the same for transformers' own forward pass, with the prompt and the picture once for each answer."""
    set_up_numerics(recipe)
    policy = build_policy(recipe, torch.device("cpu"))
    rows = read_training_rows(recipe.data, recipe.purpose).rows
    size = recipe.optim.prompts_per_step
    encode = ExampleEncoder(recipe=recipe, family=policy.family, rows=rows, order=file_order(len(rows)))
    batches = []
    for step in range(count):
        examples = [encode(rows[step * size + place], step * size + place) for place in range(size)]
        batches.append(inputs_of(policy, [each for example in examples for each in example.conversations]))
    trained = list(policy.trained_parameters().values())
    optimiser = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    loss_of = dpo_loss if isinstance(recipe, DpoRecipe) else sft_loss
    seconds, losses = [], []
    for batch in batches:
        start = time.perf_counter()
        optimiser.zero_grad()
        loss = loss_of(policy, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return seconds, losses


def inputs_of(policy: Policy, answers: Sequence[EncodedConversation]) -> dict[str, Tensor]:
    """Return a batch of conversations, padded on the right. `is_answer` marks the answers' tokens."""
    made, marks = [], []
    for each in answers:
        ids_L = torch.cat([each.prompt.token_ids_P, each.token_ids_L])
        pictures = [image.views[0].permute(2, 0, 1) for image in each.prompt.images]
        made.append(huggingface_inputs(policy.family, each.prompt, ids_L, pictures))
        marks.append(torch.arange(len(ids_L)) >= len(each.prompt.token_ids_P))
    batch = {name: torch.cat([each[name] for each in made]) for name in made[0] if name not in PADDED}
    batch |= {name: pad_sequence([each[name][0] for each in made], batch_first=True) for name in PADDED}
    return batch | {"is_answer": pad_sequence(marks, batch_first=True)}


def logprobs(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    """Return the logprobs of the answers' tokens, (B, L), 0 elsewhere. No logits are computed before the first
    answer."""
    is_answer_BT = batch["is_answer"]
    first = int(is_answer_BT.any(0).nonzero()[0])
    inputs = {name: value for name, value in batch.items() if name != "is_answer"}
    logits = policy.model(**inputs, logits_to_keep=is_answer_BT.shape[1] - first + 1).logits[:, :-1].float()
    targets_BL = batch["input_ids"][:, first:, None]
    return logits.log_softmax(-1).gather(2, targets_BL)[..., 0] * is_answer_BT[:, first:]


def sft_loss(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    return -logprobs(policy, batch).sum() / batch["is_answer"].sum()


def dpo_loss(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    assert policy.peft is not None
    with torch.no_grad(), policy.peft.disable_adapter():
        reference_B = logprobs(policy, batch).sum(1)
    rewards_B = 0.1 * (logprobs(policy, batch).sum(1) - reference_B)
    return -torch.nn.functional.logsigmoid(rewards_B[0] - rewards_B[1])


BY: dict[str, Callable[[OfflineRecipe, int], tuple[list[float], list[float]]]] = {
    "tiercel": tiercel_steps,
    "plain": plain_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=sorted(BY), required=True)
    parser.add_argument("--what", choices=tuple(ROWS), required=True)
    for name in ("model", "rows", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    task = parser.parse_args()
    with answer_stream() as stream:
        seconds, losses = BY[task.by](make_recipe(task), task.warmup + task.steps)
        answer = {"seconds": seconds[task.warmup :], "losses": losses, "peak_bytes": peak_bytes()}
        stream.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
