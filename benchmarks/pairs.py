"""Pairs, questions of one picture, and rows of all lengths: tiercel's runs against plain transformers and TRL.

    python -m benchmarks.pairs

A DPO pair has a prompt of about 1,180 tokens, most of them from a picture, and two answers of 128 tokens. Ten questions
share one such picture and have answers of 128 tokens each. Eight unlike rows have pictures and answers of all sizes,
which the plain side pads to the longest. All sides get the same rows, the same random weights (Qwen2.5-VL's shape, 16
layers, vocabulary 32k, float32, LoRA 16) and two cores. Each round starts one process per side, one after the other; a
ratio is that of the medians, its spread the ratios of the rounds. Writes benchmarks/results/pairs.json and pairs.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.drivers.measuring import QUESTION, SYSTEM
from benchmarks.shapes import SHAPES, save_images

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ANSWER_TOKENS = 128
QUESTIONS = 10
ASKED = SHAPES["qwen2_5_vl"].prompts[1180]
RAGGED = ((56, 400), (168, 20), (280, 150), (448, 60), (560, 10), (672, 90), (812, 30), (952, 250))  # side, answer
TITLES = {
    "pair": "a DPO pair",
    "questions": "SFT of ten questions of one picture",
    "ragged": "SFT of eight unlike rows, in a padded batch",
}
SIDES = {"pair": ("tiercel", "plain", "trl"), "questions": ("tiercel", "plain"), "ragged": ("tiercel", "plain")}


def write_rows(directory: Path, steps: int) -> None:
    """Write pair.jsonl, questions.jsonl and ragged.jsonl for this number of steps, each step with its own pictures."""
    save_images(directory, ASKED.side, steps)
    generator = Random(0)
    pairs, questions, ragged = [], [], []
    for place, (side, size) in enumerate(RAGGED * steps):
        save_images(directory / str(side), side, steps)
        image = f"{side}/{place // len(RAGGED):02d}.png"
        ragged.append({"id": f"r{place}", "images": [image], "messages": turns(QUESTION, answer(generator, size))})
    for number, image in enumerate(sorted(directory.glob("*.png"))):
        for place in range(QUESTIONS):
            row = {
                "id": f"{number}-{place}",
                "images": [image.name],
                "messages": turns(f"{QUESTION} {place}", answer(generator)),
            }
            questions.append(row)
            if place == 0:
                pairs.append({**row, "rejected": answer(generator)})
    for name, rows in (("pair", pairs), ("questions", questions), ("ragged", ragged)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def turns(question: str, answered: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"<image>{question}"},
        {"role": "assistant", "content": answered},
    ]


def answer(generator: Random, tokens: int = ANSWER_TOKENS) -> str:
    """Return an answer of digits, each of which is a token. The turn's end is the last one."""
    return "".join(generator.choice("0123456789") for _ in range(tokens - 1))


def run_side(what: str, by: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one process of one side."""
    words = ["--model", str(options.scratch / "model"), "--rows", str(directory / f"{what}.jsonl")]
    words += ["--scratch", str(options.scratch), "--warmup", str(options.warmup), "--steps", str(options.steps)]
    if by == "trl":
        command = [str(options.trl), "-m", "benchmarks.drivers.trl_pairs_step", *words]
    else:
        command = [sys.executable, "-m", "benchmarks.drivers.rows_step", "--by", by, "--what", what, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    log = options.scratch / f"{what}-{by}.log"
    with log.open("w") as errors:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{by} failed; see {log}")
    return json.loads(done.stdout)


def measure(what: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run rounds of all sides alternately."""
    seen: dict[str, list[dict[str, Any]]] = {by: [] for by in SIDES[what]}
    for number in range(options.rounds):
        for by in sorted(seen, reverse=number % 2 == 1):
            found = run_side(what, by, directory, options)
            seen[by].append(found)
            print(f"{what} round {number + 1} {by}: {statistics.median(found['seconds']):.2f} s a step", flush=True)
    mine = seen["tiercel"][0]["losses"]
    for by, found in seen.items():  # TRL reads the rows in another order, and before an update a pair's loss is ln 2
        both = list(zip(mine, found[0]["losses"], strict=True))[: 1 if by == "trl" else None]
        if any(abs(one - other) > 1e-3 for one, other in both):
            raise SystemExit(f"the losses of tiercel and {by} differ: {both}")
    return {"what": TITLES[what], "versions": seen.get("trl", [{}])[0].get("versions"), **compared(seen)}


def compared(seen: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the seconds and peak memory of each side, and how many times as fast tiercel is."""
    medians = {by: [statistics.median(each["seconds"]) for each in found] for by, found in seen.items()}
    peaks = {by: max(each["peak_bytes"] for each in found) for by, found in seen.items()}
    others = [by for by in seen if by != "tiercel"]
    rounds = {by: [o / t for o, t in zip(medians[by], medians["tiercel"], strict=True)] for by in others}
    all_seconds = {by: [value for each in found for value in each["seconds"]] for by, found in seen.items()}
    middle = {by: statistics.median(values) for by, values in all_seconds.items()}
    return {
        "seconds": all_seconds,
        "peak_bytes": peaks,
        "times_as_fast": {by: middle[by] / middle["tiercel"] for by in others},
        "round_ratios": rounds,
        "peak_memory_ratio": {by: peaks["tiercel"] / peaks[by] for by in others},
    }


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return the cells as Markdown."""
    lines = ["| an update from | against | it takes | tiercel | times as fast (rounds) | peak memory |"]
    lines.append("|---|---|---|---|---|---|")
    for cell in cells:
        for by, ratio in cell["times_as_fast"].items():
            mine, other = (statistics.median(cell["seconds"][side]) for side in ("tiercel", by))
            rounds = cell["round_ratios"][by]
            name = f"TRL {cell['versions']['trl']}'s DPOTrainer" if by == "trl" else "plain transformers"
            lines.append(
                f"| {cell['what']} | {name} | {other:.2f} s | {mine:.2f} s | {ratio:.2f} ({min(rounds):.2f} to "
                f"{max(rounds):.2f}) | {cell['peak_memory_ratio'][by]:.2f} of {cell['peak_bytes'][by] / 1e9:.1f} GB |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-trl/bin/python", help="the interpreter that has TRL")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a directory for pairs.json and pairs.md")
    parser.add_argument("--scratch", type=Path, default=ROOT / "runs" / "bench-pairs", help="for checkpoint and rows")
    options = parser.parse_args()
    if not (options.scratch / "model" / "model.safetensors").is_file():
        SHAPES["qwen2_5_vl"].save(options.scratch / "model", 32768, options.layers)
    rows = options.scratch / "rows"
    write_rows(rows, options.warmup + options.steps + 1)
    cells = [measure(what, rows, options) for what in SIDES]
    options.results.mkdir(exist_ok=True)
    (options.results / "pairs.json").write_text(json.dumps({"threads": 2, "cells": cells}, indent=2) + "\n")
    (options.results / "pairs.md").write_text(table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
