"""The learner against plain transformers on repeated prompts: time, modelled FLOPs and peak memory, side by side.

    python -m benchmarks.learner --cells 280,64,8 1180,128,8

Each round starts one process per side, one after the other, on the same random weights, picture and tokens (fp32,
16 layers, vocabulary 32k, LoRA 16, the vision pass counted); a cell's ratio is that of the medians, its spread the
ratios of the rounds. Writes benchmarks/results/learner.json and learner.md. P prompt tokens, C tokens of a
completion, G completions.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.drivers.measuring import LORA_RANK
from benchmarks.flops import (
    decoder_shape,
    decoder_update,
    head_update,
    vision_forward,
)
from benchmarks.shapes import save_checkpoint, save_images
from tiercel.training.operations import group_pairs, repeated_pairs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SIDES = {280: 448, 1180: 952}  # pixels of the square picture that gives about this many prompt tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One size, and what both sides saw."""

    P: int
    C: int
    G: int
    vocabulary: int
    layers: int
    tiercel_seconds: list[float]
    plain_seconds: list[float]
    round_ratios: list[float]
    learner_ratio: float
    modelled_ratio: float
    tiercel_peak_bytes: int
    plain_peak_bytes: int
    peak_memory_ratio: float  # tiercel's over the other's, whole processes
    peak_growth_ratio: float  # the same without what was there when the model was loaded


def modelled_ratio(config: Any, P: int, C: int, G: int, grid: Sequence[int]) -> float:
    """Operations of the repeated computation over those of the shared one, vision and head included."""
    shape = decoder_shape(config.text_config, LORA_RANK)
    vision = vision_forward(config.vision_config, grid).total
    shared = decoder_update(shape, P + G * C, group_pairs(P, [C] * G)) + head_update(shape, G * C)
    repeated = decoder_update(shape, G * (P + C), repeated_pairs(P, [C] * G)) + head_update(shape, G * (C + 1))
    return (repeated.total + G * vision) / (shared.total + vision)


def run_side(by: str, model: Path, image: Path, size: Sequence[int], warmup: int, steps: int) -> dict[str, Any]:
    """One process of one side."""
    _, completion_tokens, group_size = size
    command = [sys.executable, "-m", "benchmarks.drivers.learner_step", "--by", by, "--model", str(model)]
    command += ["--image", str(image), "--completion-tokens", str(completion_tokens)]
    command += ["--group-size", str(group_size), "--warmup", str(warmup), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout)


def measure(size: Sequence[int], options: argparse.Namespace) -> Cell:
    """Rounds of both sides, alternately."""
    directory = options.scratch / f"model-{options.vocabulary}-{options.layers}"
    if not (directory / "model.safetensors").is_file():
        save_checkpoint(directory, options.vocabulary, options.layers)
    images = options.scratch / f"images-{SIDES[size[0]]}"
    save_images(images, SIDES[size[0]], 1)
    seen: dict[str, list[dict[str, Any]]] = {"tiercel": [], "plain": []}
    for number in range(options.rounds):
        for by in sorted(seen, reverse=number % 2 == 1):
            answer = run_side(by, directory, images / "00.png", size, options.warmup, options.steps)
            seen[by].append(answer)
            print(f"{size} round {number + 1} {by}: {statistics.median(answer['seconds']):.2f} s a step", flush=True)
    first, other = seen["tiercel"][0], seen["plain"][0]
    for key in ("gradient_norm", "logprob_mean"):
        if abs(first[key] / other[key] - 1) > 1e-4:
            raise SystemExit(f"the sides disagree in {key}: {first[key]} and {other[key]}")
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    modelled = modelled_ratio(config, first["prompt_tokens"], *size[1:], first["grid"])
    return summary(size, first["prompt_tokens"], modelled, seen, options)


def summary(
    size: Sequence[int],
    prompt_tokens: int,
    modelled: float,
    seen: Mapping[str, Sequence[Mapping[str, Any]]],
    options: argparse.Namespace,
) -> Cell:
    """Medians and ratios of a cell."""
    _, C, G = size
    seconds = {by: [value for answer in answers for value in answer["seconds"]] for by, answers in seen.items()}
    medians = {by: [statistics.median(answer["seconds"]) for answer in answers] for by, answers in seen.items()}
    peaks = {by: max(answer["peak_bytes"] for answer in answers) for by, answers in seen.items()}
    growth = {by: max(a["peak_bytes"] - a["loaded_bytes"] for a in answers) for by, answers in seen.items()}
    return Cell(
        P=prompt_tokens,
        C=C,
        G=G,
        vocabulary=options.vocabulary,
        layers=options.layers,
        tiercel_seconds=seconds["tiercel"],
        plain_seconds=seconds["plain"],
        round_ratios=[plain / mine for plain, mine in zip(medians["plain"], medians["tiercel"], strict=True)],
        learner_ratio=statistics.median(seconds["plain"]) / statistics.median(seconds["tiercel"]),
        modelled_ratio=modelled,
        tiercel_peak_bytes=peaks["tiercel"],
        plain_peak_bytes=peaks["plain"],
        peak_memory_ratio=peaks["tiercel"] / peaks["plain"],
        peak_growth_ratio=growth["tiercel"] / growth["plain"],
    )


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| P, C, G | plain transformers | tiercel | times as fast (rounds) | modelled by FLOPs | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        plain, mine = statistics.median(cell["plain_seconds"]), statistics.median(cell["tiercel_seconds"])
        rounds = cell["round_ratios"]
        lines.append(
            f"| {cell['P']}, {cell['C']}, {cell['G']} | {plain:.2f} s | {mine:.2f} s "
            f"| {cell['learner_ratio']:.2f} ({min(rounds):.2f} to {max(rounds):.2f}) | {cell['modelled_ratio']:.2f} "
            f"| {cell['peak_memory_ratio']:.2f} of {cell['plain_peak_bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["280,64,8", "1180,128,8"], metavar="P,C,G")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "bench-learner", help="for checkpoints")
    options = parser.parse_args()
    cells = [asdict(measure([int(part) for part in cell.split(",")], options)) for cell in options.cells]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "learner.json").write_text(json.dumps({"threads": 2, "cells": cells}, indent=2) + "\n")
    (RESULTS / "learner.md").write_text(table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
