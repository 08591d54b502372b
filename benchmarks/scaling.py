"""How the time of a step falls with more ranks: measured on this machine's cores, predicted for GPUs.

    make bench-scaling
    python -m benchmarks.scaling --rounds 1 --steps 2
    python -m benchmarks.scaling --only gpus

The measurements run `tiercel grpo` on a random Qwen2.5-VL-shaped checkpoint (512 wide, 8 layers, vocabulary 32,768,
float32), with one thread for each rank and the same prompts in a step for any number of ranks. All arrangements take
turns in every round, and the first step of a process does not count. Efficiency is the seconds of one rank divided by N
times the seconds of N ranks. The predictions are those of `tiercel plan` for 8 to 1,024 H100: they rest on a data
sheet, not on a measurement.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers import machine
from benchmarks.peers_report import rounded, spread
from benchmarks.published import save_config
from benchmarks.shapes import save_checkpoint, save_images
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.config import recipe_to_yaml
from tiercel.config.rollout import Vllm
from tiercel.config.schema import Data, GrpoRecipe, Learner, Lora, Model, Optim, Rollout, Train
from tiercel.planning.devices import DEVICES
from tiercel.planning.plan import Machine, admitted, measure, option, study
from tiercel.rewards.external import ByCall
from tiercel.rewards.text import Exact

ROOT = Path(__file__).parents[1]
REWARDS = (ByCall(call="benchmarks.scaling_reward:score"),)
PHASES = ("time/step", "time/rollout", "time/learn")
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
PROMPTS_PER_STEP = 1024  # on GPUs: one for each GPU of the largest number
GPU_MEMORY = 80 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrangement:
    """Ranks under a strategy."""

    strategy: str
    ranks: int


ARRANGEMENTS = tuple(
    Arrangement(strategy=strategy, ranks=ranks) for strategy, ranks in (("single", 1), ("ddp", 2), ("fsdp2", 2))
)


def measured_recipe(work: Path, arrangement: Arrangement, output: Path, steps: int) -> GrpoRecipe:
    """Return a recipe with four prompts that have a picture each, and eight completions of 64 tokens."""
    return GrpoRecipe(
        model=Model(path=str(work / "model"), dtype="float32"),
        lora=Lora(rank=16, alpha=32),
        data=Data(train=str(work / "rows.jsonl"), image_root=str(work / "images"), workers=0),
        rewards=REWARDS,
        rollout=Rollout(group_size=8, min_new_tokens=64, max_new_tokens=64),
        learner=Learner(skip_zero_advantage=False),
        optim=Optim(lr=1e-5, prompts_per_step=4),
        train=Train(steps=steps, strategy=arrangement.strategy, threads=1),  # type: ignore[arg-type]
        output=str(output),
    )


def prepare(work: Path) -> None:
    """Create the checkpoint, pictures and rows."""
    save_checkpoint(work / "model", 32_768, 8)
    save_images(work / "images", 448, 8)
    rows = [
        {"images": [f"{number:02d}.png"], "messages": [{"role": "user", "content": "<image>What is it?"}]}
        for number in range(8)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run(work: Path, arrangement: Arrangement, number: int, steps: int) -> list[dict[str, float]]:
    """Return the phases' seconds of every step but the first."""
    name = f"{arrangement.strategy}-{arrangement.ranks}-{number}"
    file = work / f"{name}.yaml"
    recipe = measured_recipe(work, arrangement, work / name, 1 + steps)
    file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "tiercel", "grpo", str(file)]
    if arrangement.ranks > 1:
        command += ["--nproc", str(arrangement.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    lines = (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{phase: row[phase] for phase in PHASES} for row in rows if row["step"] > 1]


def measured(rounds: int, steps: int, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Return every arrangement's seconds and efficiency. The efficiency is computed for each round separately."""
    found: dict[Arrangement, list[list[dict[str, float]]]] = {arrangement: [] for arrangement in ARRANGEMENTS}
    with TemporaryDirectory() as directory:
        prepare(Path(directory))
        for number in range(rounds):
            for arrangement in ARRANGEMENTS if number % 2 == 0 else reversed(ARRANGEMENTS):
                found[arrangement].append(run(Path(directory), arrangement, number, steps))
                say(f"round {number + 1} of {rounds}: {arrangement.strategy} on {arrangement.ranks} done")
    return [measured_row(arrangement, found[arrangement], found[ARRANGEMENTS[0]]) for arrangement in ARRANGEMENTS]


def measured_row(
    arrangement: Arrangement, mine: list[list[dict[str, float]]], alone: list[list[dict[str, float]]]
) -> dict[str, Any]:
    """Return the spread over all steps of all rounds, and the efficiency relative to one rank."""

    def of_round(steps: Iterable[Mapping[str, float]]) -> float:
        return median(step["time/step"] for step in steps)

    efficiency = [of_round(a) / (arrangement.ranks * of_round(b)) for a, b in zip(alone, mine, strict=True)]
    return {
        "strategy": arrangement.strategy,
        "ranks": arrangement.ranks,
        "seconds": {phase: spread([step[phase] for steps in mine for step in steps]) for phase in PHASES},
        "efficiency": spread(efficiency),
    }


def gpu_recipe(size: str, directory: Path) -> GrpoRecipe:
    """Return a LoRA recipe with one long prompt for each of the most GPUs. A model that is too large for the local
    engine samples with vLLM."""
    is_large = size == "72b"
    vllm = Vllm(tensor_parallel=8, gpu_memory_utilization=0.3) if is_large else Vllm()
    return GrpoRecipe(
        model=Model(path=str(save_config("qwen2_5_vl", size, directory))),
        lora=Lora(rank=16 if is_large else 64),
        data=Data(train="rows.jsonl", max_prompt_tokens=1536),
        rewards=(Exact(),),
        rollout=Rollout(engine="vllm" if is_large else "local", vllm=vllm, group_size=8, max_new_tokens=512),
        learner=Learner(gradient_checkpointing=is_large, max_tokens_per_microbatch=8192),
        optim=Optim(prompts_per_step=PROMPTS_PER_STEP),
        train=Train(steps=1),
        output="run",
    )


def foretold(sizes: Iterable[str]) -> list[dict[str, Any]]:
    """Return, for each size of model and number of GPUs, the first strategy that fits and its seconds."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        with TemporaryDirectory() as directory:
            recipe = gpu_recipe(size, Path(directory))
            subject = study(recipe, None)
            bytes_of_passes = measure(subject)
        first: tuple[int, float] | None = None
        for ranks in GPUS:
            gpus = Machine(ranks=ranks, memory_bytes=GPU_MEMORY, device=DEVICES["h100"])
            options = [option(subject, bytes_of_passes, gpus, name) for name in admitted(recipe, ranks)]
            chosen = next(each for each in options if each.fits)
            total = sum(chosen.seconds.values())
            first = first or (ranks, total)
            rows.append(
                {
                    "model": size,
                    "gpus": ranks,
                    "strategy": chosen.memory.strategy,
                    "peak_bytes": chosen.memory.peak,
                    "seconds": {name: rounded(seconds) for name, seconds in chosen.seconds.items()},
                    "step_seconds": rounded(total),
                    "efficiency": rounded(first[0] * first[1] / (ranks * total)),
                }
            )
    return rows


def markdown(results: Mapping[str, Any]) -> str:
    """Return both tables."""
    text = ""
    if rows := results.get("measured"):
        text += (
            f"Measured on {results['machine']['cores']} cores ({results['machine']['processor']}), one thread for each "
            f"rank, load {results['load']:.1f} before; medians (min to max) of {results['rounds']} rounds of "
            f"{results['steps']} steps, efficiency by rounds.\n\n"
        )
        text += markdown_table(
            ("strategy", "ranks", "step, s", "rollout, s", "learning, s", "efficiency"),
            [
                (
                    row["strategy"],
                    str(row["ranks"]),
                    *(_spread(row["seconds"][phase]) for phase in PHASES),
                    _spread(row["efficiency"]),
                )
                for row in rows
            ],
        )
    if rows := results.get("foretold"):
        phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]))
        text += (
            "\nForetold by the plan for H100s of 80 GB (8 in a machine, 450 GB/s within it, 50 GB/s and GPU between "
            "machines; the shares of them that are assumed are in `tiercel/planning/seconds.py`): "
            f"{PROMPTS_PER_STEP:,} prompts of 1,536 tokens a step, 8 completions of 512; images and rewards are not in "
            "it. No measurement.\n\n"
        )
        text += markdown_table(
            (
                "Qwen2.5-VL",
                "GPUs",
                "strategy",
                "GB at most",
                *(f"{name}, s" for name in phases),
                "step, s",
                "efficiency",
            ),
            [
                (
                    row["model"],
                    f"{row['gpus']:,}",
                    row["strategy"],
                    f"{row['peak_bytes'] / 1e9:.0f}",
                    *(f"{row['seconds'].get(phase, 0.0):.2f}" for phase in phases),
                    f"{row['step_seconds']:.1f}",
                    f"{row['efficiency']:.2f}",
                )
                for row in rows
            ],
        )
    return text


def _spread(value: Mapping[str, Any]) -> str:
    middle, low, high = (f"{value[key]:.2f}" for key in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ranks", "gpus"), help="the one table; the other one is kept as it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="counted in each round")
    parser.add_argument("--models", nargs="+", default=["7b", "72b"], help="for the GPUs' table")
    parser.add_argument("--results", type=Path, default=RESULTS / "scaling.json")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    results: dict[str, Any] = {}
    if arguments.results.exists():
        results = json.loads(arguments.results.read_text(encoding="utf-8"))
    if arguments.only != "gpus":
        results |= {"machine": machine(), "versions": versions(), "load": os.getloadavg()[0]}
        results |= {"rounds": arguments.rounds, "steps": arguments.steps}
        results["measured"] = measured(arguments.rounds, arguments.steps)
    if arguments.only != "ranks":
        results["foretold"] = foretold(arguments.models)
    text = markdown(results)
    print(text)
    write_results(arguments.results, results, text)


if __name__ == "__main__":
    main()
