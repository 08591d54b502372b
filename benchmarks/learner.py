"""The learner against plain transformers on repeated prompts: time, modelled FLOPs and peak memory, side by side.

    python -m benchmarks.learner --shapes qwen2_5_vl qwen3_5 gemma3 --cells 280,64,8 1180,128,8

Each round starts one process per side, one after the other, on the same random weights, picture and tokens (fp32, 16
layers, vocabulary 32k, LoRA 16, the vision pass counted). A cell's ratio is that of the medians, and its spread the
ratios of the rounds. Operations are modelled for Qwen2.5-VL's shape. Writes benchmarks/results/learner.json and
learner.md, where cells of shapes that are not measured this time stay. P prompt tokens, C tokens of a completion, G
completions.
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
    group_pairs,
    head_update,
    repeated_pairs,
    vision_forward,
)
from benchmarks.shapes import SHAPES, save_images

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One shape and size, and the measurements of both sides."""

    shape: str
    P: int
    C: int
    G: int
    vocabulary: int
    layers: int
    tiercel_seconds: list[float]
    plain_seconds: list[float]
    round_ratios: list[float]
    learner_ratio: float
    modelled_ratio: float | None  # None for shapes whose operations are not modelled
    tiercel_peak_bytes: int
    plain_peak_bytes: int
    peak_memory_ratio: float  # tiercel's over the other's, whole processes
    peak_growth_ratio: float  # the same without the memory at the time the model was loaded


def modelled_ratio(config: Any, P: int, C: int, G: int, grid: Sequence[int]) -> float:
    """Return the operations of the repeated computation over those of the shared one, vision and head included."""
    shape = decoder_shape(config.text_config, LORA_RANK)
    vision = vision_forward(config.vision_config, grid).total
    shared = decoder_update(shape, P + G * C, group_pairs(P, [C] * G)) + head_update(shape, G * C)
    repeated = decoder_update(shape, G * (P + C), repeated_pairs(P, [C] * G)) + head_update(shape, G * (C + 1))
    return (repeated.total + G * vision) / (shared.total + vision)


def run_side(by: str, prompt: Sequence[str], size: Sequence[int], warmup: int, steps: int) -> dict[str, Any]:
    """Run one process of one side. `prompt` has the words of the command that describe model and prompt."""
    _, completion_tokens, group_size = size
    command = [sys.executable, "-m", "benchmarks.drivers.learner_step", "--by", by, *prompt]
    command += ["--completion-tokens", str(completion_tokens), "--group-size", str(group_size)]
    command += ["--warmup", str(warmup), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    return json.loads(done.stdout)


def measure(name: str, size: Sequence[int], options: argparse.Namespace) -> Cell:
    """Run rounds of both sides alternately."""
    shape = SHAPES[name]
    asked = shape.prompts[size[0]]
    directory = options.scratch / f"{name}-{options.vocabulary}-{options.layers}"
    if not (directory / "model.safetensors").is_file():
        shape.save(directory, options.vocabulary, options.layers)
    images = options.scratch / f"images-{asked.side}"
    save_images(images, asked.side, asked.pictures)
    pictures = sorted(images.glob("*.png"))[: asked.pictures]
    prompt = ["--model", str(directory), "--questions", str(asked.questions), "--images", *map(str, pictures)]
    seen: dict[str, list[dict[str, Any]]] = {"tiercel": [], "plain": []}
    for number in range(options.rounds):
        for by in sorted(seen, reverse=number % 2 == 1):
            answer = run_side(by, prompt, size, options.warmup, options.steps)
            seen[by].append(answer)
            print(
                f"{name} {size} round {number + 1} {by}: {statistics.median(answer['seconds']):.2f} s a step",
                flush=True,
            )
    first, other = seen["tiercel"][0], seen["plain"][0]
    for key in ("gradient_norm", "logprob_mean"):
        if abs(first[key] / other[key] - 1) > 1e-4:
            raise SystemExit(f"the sides disagree in {key}: {first[key]} and {other[key]}")
    return summary(name, size, modelled(name, directory, size, first), seen, options)


def modelled(name: str, directory: Path, size: Sequence[int], seen: Mapping[str, Any]) -> float | None:
    """Return the ratio of the operations if they are modelled."""
    if name != "qwen2_5_vl":
        return None
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    return modelled_ratio(config, seen["prompt_tokens"], *size[1:], seen["grid"])


def summary(
    name: str,
    size: Sequence[int],
    modelled_ratio: float | None,
    seen: Mapping[str, Sequence[Mapping[str, Any]]],
    options: argparse.Namespace,
) -> Cell:
    """Return the medians and ratios of a cell."""
    _, C, G = size
    seconds = {by: [value for answer in answers for value in answer["seconds"]] for by, answers in seen.items()}
    medians = {by: [statistics.median(answer["seconds"]) for answer in answers] for by, answers in seen.items()}
    peaks = {by: max(answer["peak_bytes"] for answer in answers) for by, answers in seen.items()}
    growth = {by: max(a["peak_bytes"] - a["loaded_bytes"] for a in answers) for by, answers in seen.items()}
    return Cell(
        shape=SHAPES[name].title,
        P=seen["tiercel"][0]["prompt_tokens"],
        C=C,
        G=G,
        vocabulary=options.vocabulary,
        layers=options.layers,
        tiercel_seconds=seconds["tiercel"],
        plain_seconds=seconds["plain"],
        round_ratios=[plain / mine for plain, mine in zip(medians["plain"], medians["tiercel"], strict=True)],
        learner_ratio=statistics.median(seconds["plain"]) / statistics.median(seconds["tiercel"]),
        modelled_ratio=modelled_ratio,
        tiercel_peak_bytes=peaks["tiercel"],
        plain_peak_bytes=peaks["plain"],
        peak_memory_ratio=peaks["tiercel"] / peaks["plain"],
        peak_growth_ratio=growth["tiercel"] / growth["plain"],
    )


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the cells as Markdown."""
    lines = [
        "| shape | P, C, G | plain transformers | tiercel | times as fast (rounds) | modelled by FLOPs | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        plain, mine = statistics.median(cell["plain_seconds"]), statistics.median(cell["tiercel_seconds"])
        rounds = cell["round_ratios"]
        modelled = "-" if cell["modelled_ratio"] is None else f"{cell['modelled_ratio']:.2f}"
        lines.append(
            f"| {cell['shape']} | {cell['P']}, {cell['C']}, {cell['G']} | {plain:.2f} s | {mine:.2f} s "
            f"| {cell['learner_ratio']:.2f} ({min(rounds):.2f} to {max(rounds):.2f}) | {modelled} "
            f"| {cell['peak_memory_ratio']:.2f} of {cell['plain_peak_bytes'] / 1e9:.1f} GB |"
        )
    return "\n".join(lines) + "\n"


def kept(file: Path, measured: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the cells of an earlier run with other shapes."""
    titles = [SHAPES[name].title for name in measured]
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"] if file.is_file() else []
    return [cell for cell in cells if cell["shape"] not in titles]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--cells", nargs="+", default=["280,64,8", "1180,128,8"], metavar="P,C,G")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="a directory for learner.json and learner.md")
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "bench-learner", help="for checkpoints")
    options = parser.parse_args()
    sizes = [[int(part) for part in cell.split(",")] for cell in options.cells]
    cells = [asdict(measure(name, size, options)) for name in options.shapes for size in sizes]
    options.results.mkdir(exist_ok=True)
    cells = kept(options.results / "learner.json", options.shapes) + cells
    (options.results / "learner.json").write_text(json.dumps({"threads": 2, "cells": cells}, indent=2) + "\n")
    (options.results / "learner.md").write_text(table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
