"""One long row computed by 1, 2 and 4 ranks together (train.context_parallel): gradient, memory and seconds.

    make bench-long-rows

A group of two completions of 256 tokens answers a prompt with a video and four pictures. The model has Qwen2.5-VL's
shape (512 wide, 8 layers, vocabulary 32k, random weights, float32, LoRA 16, a frozen tower). Each arrangement makes the
same update in its own processes, on CPUs by gloo, one thread each, after one of two words. Memory is the growth of a
rank's process during it, from before to its peak, for the rank with the most. Freed memory goes back to the system at
once, so that the peak is that of memory in use. Seconds of ranks that share two cores say little about GPUs. Writes
benchmarks/results/long_rows.json and long_rows.md.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.shapes import save_checkpoint, save_images
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.config.data import Video
from tiercel.config.schema import Data, GrpoRecipe, Learner, Lora, Model, Optim, Rollout, Train
from tiercel.data.encoding import prompt_encoder
from tiercel.data.reading import read_rows
from tiercel.distributed.launch import leave
from tiercel.distributed.ranks import Ranks, joined_ranks
from tiercel.packing.batch import AdvantageGroup, advantage_group, prompt_of_no_row
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.rewards.text import Exact
from tiercel.training.grpo.minibatch_updates import learn
from tiercel.training.trainer import build_trainer
from tiercel.types import Completion, EncodedPrompt

FRAMES, PICTURES, SIDE = 32, 4, 448
COMPLETIONS, LENGTH = 2, 256
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Ranks that compute the row together, and the form that they compute it in."""

    ranks: int
    form: str

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.form}"


# One rank has two forms: the one that it chooses by itself, and the one that ranks on CPUs can compute together.
ARRANGEMENTS = tuple(
    Arrangement(ranks=ranks, form=form) for ranks, form in ((1, "split"), (1, "dense"), (2, "dense"), (4, "dense"))
)


def recipe_of(work: Path, arrangement: Arrangement, checkpointing: bool) -> GrpoRecipe:
    """Return the recipe of an arrangement. Its recorded rollout has random logprobs."""
    return GrpoRecipe(
        model=Model(path=str(work / "model"), dtype="float32"),
        lora=Lora(rank=16, alpha=32),
        data=Data(
            train=str(work / "rows.jsonl"),
            image_root=str(work / "images"),
            max_prompt_tokens=8192,
            video=Video(max_frames=FRAMES),
        ),
        rewards=(Exact(name="exact"),),
        rollout=Rollout(group_size=COMPLETIONS, max_new_tokens=LENGTH, parity_action="warn"),
        learner=Learner(
            form=arrangement.form,  # type: ignore[arg-type]
            max_tokens_per_microbatch=16384,
            gradient_checkpointing="full" if checkpointing else False,  # type: ignore[arg-type]
        ),
        optim=Optim(lr=1e-5, prompts_per_step=1),
        train=Train(steps=1, context_parallel=arrangement.ranks, threads=1),
        output="unused",
    )


def prepare(work: Path) -> None:
    """Write the checkpoint, the pictures and the row."""
    save_checkpoint(work / "model", 32_768, 8)
    save_images(work / "images", SIDE, FRAMES + PICTURES)
    names = [f"{number:02d}.png" for number in range(FRAMES + PICTURES)]
    question = "<video>" + "<image>" * PICTURES + "What is it?"
    row = {"videos": [names[:FRAMES]], "images": names[FRAMES:], "messages": [{"role": "user", "content": question}]}
    (work / "rows.jsonl").write_text(json.dumps({**row, "answer": "7"}) + "\n", encoding="utf-8")


def recorded(prompt: EncodedPrompt, vocabulary: int) -> AdvantageGroup:
    """Return a group of random words with the advantages -1 and 1."""
    draws = random.Random(0)
    completions = [
        Completion(
            token_ids_L=torch.tensor([draws.randrange(vocabulary) for _ in range(LENGTH)]),
            logprobs_L=torch.full((LENGTH,), -10.0),
            text="",
            is_truncated=False,
            seed=number,
        )
        for number in range(COMPLETIONS)
    ]
    return advantage_group(prompt, completions, [-1.0, 1.0])


def memory(field: str) -> int:
    """Return the bytes of this process: VmRSS, or its peak VmHWM."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines[field].split()[0])


def measure_rank(recipe: GrpoRecipe, ranks: Ranks, gradient_file: Path) -> dict[str, Any]:
    """Make the updates on this rank. The first rank keeps the gradient and returns the figures."""
    trainer = build_trainer(recipe, ranks=ranks)
    rows = read_rows(recipe.data.train, recipe.data, "grpo").rows
    prompt = prompt_encoder(trainer.policy.family, recipe.data)(rows[0], 0)
    if ranks.is_first:
        trainer.vision.features(prompt.images)  # as after a rollout
    prompts = [prompt_of_no_row(torch.tensor([5, 6]), torch.zeros(3, 2, dtype=torch.int64)), prompt]
    update, kept = trainer.strategy.update, []

    def keeping(norm: float, max_norm: float) -> bool:
        kept.append({name: each.clone() for name, each in trainer.strategy.gradients().items()})
        return update(norm, 0.0)  # so that both updates have the same weights

    trainer.strategy.update = keeping  # type: ignore[method-assign]
    for each in prompts:
        groups = [recorded(each, 30_000)] if ranks.is_first else []
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again
        before, started = memory("VmRSS"), time.perf_counter()
        learn(trainer, groups, recipe)
        seconds, grown = time.perf_counter() - started, memory("VmHWM") - before
    every = ranks.all_gather(grown)
    if ranks.is_first:
        save_file(kept[-1], gradient_file)
    return {
        "tokens": groups[0].item.shared_length if groups else 0,
        "bytes": max(every),
        "bytes_of_ranks": every,
        "seconds": ranks.all_reduce_max(round(1000 * seconds)) / 1000,
    }


def run(work: Path, arrangement: Arrangement, checkpointing: bool) -> dict[str, Any]:
    """Start the ranks of an arrangement and return what they measured."""
    out = work / f"{arrangement.ranks}-{arrangement.form}-{checkpointing}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arrangement.ranks}"]
    arguments = ["--rank-of", str(work), "--ranks", str(arrangement.ranks), "--form", arrangement.form]
    arguments += ["--out", str(out), *(["--checkpointing"] if checkpointing else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    subprocess.run(
        [*command, "-m", "benchmarks.long_rows", *arguments], env=environment, check=True, timeout=2 * TIMEOUT_SECONDS
    )
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


def distance(work: Path, arrangement: Arrangement, checkpointing: bool) -> float:
    """Return the relative distance of a gradient from that of one rank in its own form."""
    first = ARRANGEMENTS[0]
    own, right = (
        load_file(work / f"{each.ranks}-{each.form}-{checkpointing}.safetensors") for each in (arrangement, first)
    )
    square = sum(float((own[name] - right[name]).double().square().sum()) for name in right)
    return (square / sum(float(gradient.double().square().sum()) for gradient in right.values())) ** 0.5


def tables(found: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    tokens = found["arrangements"][0]["tokens"]
    text = f"# Long rows over several ranks\n\nA row of {tokens:,} tokens, {found['machine']}.\n"
    for checkpointing in (False, True):
        mine = [each for each in found["arrangements"] if each["checkpointing"] == checkpointing]
        text += f"\nlearner.gradient_checkpointing: {'full' if checkpointing else 'false'}\n\n"
        rows = [
            [
                each["name"],
                f"{each['bytes'] / 1e6:,.0f} MB",
                f"{mine[0]['bytes'] / each['bytes']:.2f}",
                f"{each['seconds']:.1f}",
                f"{each['distance']:.1e}",
            ]
            for each in mine
        ]
        text += markdown_table(("computed by", "memory a rank", "less by", "seconds", "gradient off by"), rows)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--form", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "long_rows")
    options = parser.parse_args()
    if options.rank_of is not None:
        torch.set_num_threads(1)
        recipe = recipe_of(options.rank_of, Arrangement(ranks=options.ranks, form=options.form), options.checkpointing)
        with joined_ranks(TIMEOUT_SECONDS, Heartbeat(int(os.environ["RANK"]))) as ranks:
            figures = measure_rank(recipe, ranks, options.out.with_suffix(".safetensors"))
            if ranks.is_first:
                options.out.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")
        leave(0)
    with TemporaryDirectory() as name:
        work, arrangements = Path(name), []
        prepare(work)
        for checkpointing in (False, True):
            for each in ARRANGEMENTS:
                figures = run(work, each, checkpointing)
                figures |= {"name": each.name, "ranks": each.ranks, "checkpointing": checkpointing}
                figures["distance"] = distance(work, each, checkpointing)
                print(f"{each.name}, checkpointing {checkpointing}: {figures}", flush=True)
                arrangements.append(figures)
    found = {"versions": versions(), "machine": f"{os.cpu_count()} CPU cores", "arrangements": arrangements}
    write_results(options.out.with_suffix(".json"), found, tables(found))


if __name__ == "__main__":
    main()
