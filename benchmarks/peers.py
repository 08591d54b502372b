"""A GRPO step of tiercel against the same step of TRL and of ms-swift, on CPU, in float32.

    make bench-peers
    python -m benchmarks.peers --cells short large-image-32k --peers trl --rounds 3

All have the same random weights, images, prompt, LoRA layers and lengths. In each round, every framework runs in its
own process and environment, one after the other; the first step of a process does not count. Cells that the results
file already has are not run again. The machine should be otherwise idle.

The peer trl_compact is TRL with its head as on a GPU: on a CPU, TRL puts the prompt's tokens through the head as well.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers_report import Runs, cell_key, make_cell, problems, spread, with_cell, write_results

ROOT = Path(__file__).parents[1]
PEERS = ("trl", "trl_compact", "swift")
PYTHONS = {
    "tiercel": ".venv/bin/python",
    "trl": ".venv-trl/bin/python",
    "trl_compact": ".venv-trl/bin/python",
    "swift": ".venv-swift/bin/python",
}
WARMUP = 1
SIDES = {
    "short": 448,
    "large-image": 952,
    "long-completion": 448,
    "expressions": 896,
}  # pixels; multiples of 28, so nobody resizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One shape of a step. P, the prompt's tokens, follows from the image's side: 256 or 1156, and 30 of text."""

    name: str
    side: int  # pixels
    completion_tokens: int
    group_size: int
    questions: int = 1  # of the step's image
    vocabulary: int
    layers: int
    steps: int  # counted in each round
    peers: tuple[str, ...]

    def shape(self) -> dict[str, Any]:
        """Return what the results file says about it."""
        return {
            "name": self.name,
            "C": self.completion_tokens,
            "G": self.group_size,
            "questions": self.questions,
            "vocabulary": self.vocabulary,
            "layers": self.layers,
        }


def make_cells(layers: int) -> dict[str, Cell]:
    """Return all cells by name. ms-swift has Qwen's special ids in its source, so it can use only the full
    vocabulary. A step of the last two has all questions of one picture: 7 expressions to be found, 10 short answers."""
    cells = {}
    for suffix, vocabulary, peers in (("", 152_064, PEERS), ("-32k", 32_768, ("trl", "trl_compact"))):
        for shape, completion_tokens, steps in (("short", 64, 3), ("large-image", 128, 2), ("long-completion", 512, 2)):
            name = shape + suffix
            cells[name] = Cell(
                name=name,
                side=SIDES[shape],
                completion_tokens=completion_tokens,
                group_size=8,
                vocabulary=vocabulary,
                layers=layers,
                steps=steps,
                peers=peers,
            )
    for name, questions, completion_tokens in (("expressions", 7, 30), ("questions", 10, 4)):
        cells[name] = Cell(
            name=name,
            side=SIDES["expressions"],
            completion_tokens=completion_tokens,
            group_size=8,
            questions=questions,
            vocabulary=152_064,
            layers=layers,
            steps=1,
            peers=("trl_compact", "swift"),
        )
    return cells


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on."""
    processors = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "processor": processors[0] if processors else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S ") + text, flush=True)


def run_module(framework: str, module: str, arguments: Sequence[str], work: Path, threads: int) -> str:
    """Return the standard output of a module run in a framework's environment. Standard error goes to a file in
    `work`."""
    python = ROOT / PYTHONS[framework]
    if not python.exists():
        raise SystemExit(f"{PYTHONS[framework]} is missing; make bench-peers builds the environments")
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hub"),
        "MODELSCOPE_CACHE": str(work / "hub"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = work / f"{framework}.log"
    with log.open("w", encoding="utf-8") as errors:
        command = [str(python), "-m", module, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise SystemExit(f"{module} ended with {done.returncode}; the end of {log}:\n{tail}")
    return done.stdout


def prepare(cell: Cell, steps: int, work: Path) -> tuple[Path, Path]:
    """Return the cell's checkpoint and its images, which are made if they do not exist yet."""
    model = work / f"model-{cell.vocabulary}-{cell.layers}"
    if not (model / "preprocessor_config.json").exists():  # the last file to be written
        say(f"writing {model.name}")
        sizes = ["--vocabulary", str(cell.vocabulary), "--layers", str(cell.layers)]
        run_module("tiercel", "benchmarks.shapes", [str(model), *sizes], work, 1)
    images = work / f"images-{cell.side}"
    count = WARMUP + steps
    if len(list(images.glob("*.png"))) < count:
        sizes = ["--side", str(cell.side), "--count", str(count)]
        run_module("tiercel", "benchmarks.shapes", [str(images), *sizes], work, 1)
    return model, images


def run_driver(framework: str, cell: Cell, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one process of one framework, and return its measurement."""
    model, images = prepare(cell, steps, options.work)
    scratch = options.work / "scratch"
    scratch.mkdir(exist_ok=True)
    arguments = {
        "model": model,
        "images": images,
        "scratch": scratch,
        "completion-tokens": cell.completion_tokens,
        "group-size": cell.group_size,
        "questions": cell.questions,
        "warmup": WARMUP,
        "steps": steps,
    }
    load = os.getloadavg()[0]
    flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    output = run_module(framework, f"benchmarks.drivers.{framework}_step", flags, options.work, options.threads)
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    step = spread(answer["step_seconds"])
    say(
        f"  {framework:<11} {step['median']:8.2f} s a step ({step['min']:.2f} to {step['max']:.2f}), "
        f"P {answer['prompt_tokens']}, peak {answer['peak_bytes'] / 2**30:.2f} GiB, load before {load:.1f}"
    )
    return answer


def run_cell(cell: Cell, peers: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all rounds of a cell, with frameworks in turn, and return one row of results for each peer."""
    steps = options.steps or cell.steps
    frameworks = ("tiercel", *peers)
    answers: dict[str, list[dict[str, Any]]] = {framework: [] for framework in frameworks}
    for number in range(options.rounds):
        say(f"{cell.name}: round {number + 1} of {options.rounds}, {steps} steps each")
        for framework in frameworks:
            answers[framework].append(run_driver(framework, cell, steps, options))
    runs = {framework: Runs(framework=framework, answers=answers[framework]) for framework in frameworks}
    prompt_tokens = answers["tiercel"][0]["prompt_tokens"]
    count = steps * cell.questions * cell.group_size
    found = [text for run in runs.values() for text in problems(run, cell.completion_tokens, count, prompt_tokens)]
    sizes = {framework: answers[framework][0]["trained_parameters"] for framework in frameworks}
    if len(set(sizes.values())) > 1:
        found.append(f"trained parameters differ: {sizes}")
    if found:
        raise SystemExit(f"{cell.name} compares unequal work: " + "; ".join(found))
    return [make_cell(cell.shape(), runs["tiercel"], runs[peer]) for peer in peers]


def parse_options() -> argparse.Namespace:
    cells = make_cells(8)
    usual = [name for name, cell in cells.items() if cell.questions == 1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=cells, default=usual, metavar="CELL", help=", ".join(cells))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--steps", type=int, help="counted steps of a process; 3, or 2 in the larger cells")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each framework in each cell (2)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers (8)")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of every process (2)")
    parser.add_argument("--again", action="store_true", help="run cells that the results file has already, too")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/peers.json")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/bench-peers", help="checkpoints, images, logs")
    options = parser.parse_args()
    for name in ("steps", "rounds", "layers", "threads"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    return options


def earlier_cells(file: Path, here: dict[str, Any]) -> list[Any]:
    """Return the cells of the results file. One from another machine is not mixed with this one's."""
    if not file.exists():
        return []
    results = json.loads(file.read_text(encoding="utf-8"))
    if results["machine"] != here:
        raise SystemExit(f"{file} is of another machine or number of threads; remove it, or write to another --out")
    return list(results["cells"])


def main() -> int:
    options = parse_options()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    here = machine() | {"threads": options.threads}
    cells = earlier_cells(options.out, here)
    finished = set() if options.again else {cell_key(cell) for cell in cells}
    for cell in (make_cells(options.layers)[name] for name in options.cells):
        wanted = [peer for peer in cell.peers if peer in options.peers]
        missing = [
            peer
            for peer in wanted
            if cell_key({"cell": cell.name, "peer": peer, "layers": cell.layers}) not in finished
        ]
        if not missing:
            say(f"{cell.name}: nothing left to do")
            continue
        for row in run_cell(cell, missing, options):
            cells = with_cell(cells, row)
            say(f"  {row['peer']}: step {row['step_ratio']} x, learner {row['learner_ratio']} x")
        write_results(options.out, {"machine": here, "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
