"""Prefix trees against prompts shared only, and against plain transformers: tokens computed, time and peak memory.

    python -m benchmarks.trees --workloads rec vqa

Each round starts one process for each side, one after the other, on the same random weights (Qwen2.5-VL's shape, 16
layers, vocabulary 32k, float32, LoRA 16), picture and tokens, with two threads; the vision pass is on the clock. Plain
transformers, which take minutes, run in the first round only, one pass. A ratio is that of the medians, its spread the
ratios to the rounds of the tree. Writes benchmarks/results/trees.json and .md, where
workloads that are not measured this time stay.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.drivers.tree_step import WORKLOADS
from benchmarks.peers import machine
from benchmarks.shapes import SHAPES, save_images
from benchmarks.tables import RESULTS, markdown_table, write_results

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("tree", "prompt", "plain")


def run_side(by: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one process of one side."""
    model, image = _files(WORKLOADS[name].side, options.scratch)
    command = [sys.executable, "-m", "benchmarks.drivers.tree_step", "--by", by, "--workload", name]
    command += ["--model", str(model), "--images", str(image), "--budget", str(options.budget)]
    command += ["--warmup", "0", "--steps", "1"] if by == "plain" else ["--warmup", "1", "--steps", str(options.steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout)


def _files(side: int, scratch: Path) -> tuple[Path, Path]:
    model, images = scratch / "qwen2_5_vl", scratch / f"images-{side}"
    if not (model / "model.safetensors").is_file():
        SHAPES["qwen2_5_vl"].save(model, 32768, 16)
    save_images(images, side, 1)
    return model, sorted(images.glob("*.png"))[0]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of all sides. Raises SystemExit if they compute something else."""
    seen: dict[str, list[dict[str, Any]]] = {by: [] for by in SIDES}
    for number in range(options.rounds):
        for by in SIDES[: 2 if number else 3][:: 1 if number % 2 else -1]:
            seen[by].append(run_side(by, name, options))
            print(f"{name}, round {number + 1}, {by}: {statistics.median(seen[by][-1]['seconds']):.2f} s", flush=True)
    for by in ("prompt", "plain"):
        for key in ("gradient_norm", "logprob_mean"):
            if abs(seen["tree"][0][key] / seen[by][0][key] - 1) > 1e-4:
                raise SystemExit(f"the sides disagree in {key}: {seen['tree'][0][key]}, {by} {seen[by][0][key]}")
    medians = {by: [statistics.median(each["seconds"]) for each in answers] for by, answers in seen.items()}
    return {
        "title": WORKLOADS[name].title,
        "tokens": seen["tree"][0]["tokens"],
        "seconds": {by: statistics.median(medians[by]) for by in SIDES},
        "rounds": {
            "prompt": [other / own for other, own in zip(medians["prompt"], medians["tree"], strict=True)],
            "plain": [medians["plain"][0] / own for own in medians["tree"]],
        },
        "peak_bytes": {by: max(each["peak_bytes"] for each in answers) for by, answers in seen.items()},
        "grown_bytes": {by: max(a["peak_bytes"] - a["loaded_bytes"] for a in answers) for by, answers in seen.items()},
    }


def table(found: dict[str, Any]) -> str:
    """Return the workloads as Markdown."""
    header = ["", "tokens: repeated, prompts shared, tree", "s: plain", "prompts shared", "tree"]
    header += ["times plain (rounds)", "times prompts shared (rounds)", "memory beyond the model, of prompts shared"]
    rows = []
    for each in found["workloads"].values():
        seconds, tokens, grown = each["seconds"], each["tokens"], each["grown_bytes"]
        rows.append(
            [
                each["title"],
                f"{tokens['repeated']:,}, {tokens['prompt']:,}, {tokens['tree']:,}",
                *(f"{seconds[by]:.2f}" for by in ("plain", "prompt", "tree")),
                *(_ratio(each, by) for by in ("plain", "prompt")),
                f"{grown['tree'] / grown['prompt']:.2f} of {grown['prompt'] / 1e9:.2f} GB",
            ]
        )
    return markdown_table(header, rows)


def _ratio(each: dict[str, Any], by: str) -> str:
    rounds = each["rounds"][by]
    return f"{each['seconds'][by] / each['seconds']['tree']:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--budget", type=int, default=10_000, help="tokens of a microbatch")
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "bench-trees", help="for the checkpoint")
    options = parser.parse_args()
    file = RESULTS / "trees.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"workloads": {}}
    found |= {"machine": machine(), "budget": options.budget}
    for name in options.workloads:
        found["workloads"][name] = measure(name, options)
        write_results(file, found, table(found))
    print(table(found))


if __name__ == "__main__":
    main()
