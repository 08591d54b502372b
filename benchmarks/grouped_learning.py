"""GRPO on sheets with four questions each, with the questions of a sheet in one step and with rows as they come: what
is learnt, and in how many seconds.

    python -m benchmarks.grouped_learning --seeds 0 1

The demo's sheets, kinds of questions and starting model. All rows begin with the same long system turn, which both ways
share, so a sheet's 16 tokens are all that grouping can add. SFT is run once; then both recipes of a seed run side by
side, with a thread each, so that what else the machine does is the same for both. Writes
benchmarks/results/grouped_learning.json and .md.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.demo.command import START
from tiercel.demo.handwriting import dialogue, save_picture, write_rows
from tiercel.demo.questions import KINDS, ask
from tiercel.demo.results import by_kind, read_groups
from tiercel.demo.running import RECIPES, run_command, write_data
from tiercel.demo.sheet_rows import RowSet
from tiercel.demo.sheets import Stationery
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import groups_path
from tiercel.training.evaluation import wilson

DATA, RUNS = Path("runs/grouped-data"), Path("runs/grouped")
SYSTEM = (
    "First read out the digits of the sheet from left to right, each with its ink, "
    "and note what it means for the question."
)
FILES = (  # `count` sheets, each with a question of every kind
    RowSet(name="warmup", count=480, seed=1, slips=0.5),
    RowSet(name="practice", count=900, seed=2),
    RowSet(name="heldout", count=256, seed=3, is_held_out=True),
)
WAYS = {"one by one": (), "by sheet": ("data.group_by_prefix=true", "data.rows_per_prefix=4")}


def write_sheets(directory: Path, rows: RowSet) -> Path:
    """Write the rows of sheets that allow a question of every kind."""
    stationery, generator = Stationery(is_held_out=rows.is_held_out), np.random.default_rng(rows.seed)
    dice = np.random.default_rng([rows.seed, 1])
    written: list[Any] = []
    while len(written) < rows.count * len(KINDS):
        sheet = stationery.draw(generator)
        questions = [question for kind in KINDS if (question := ask(sheet, kind, generator))]
        if len(questions) < len(KINDS):
            continue
        file = save_picture(sheet.image, directory, f"{rows.name}-{len(written):05d}")
        for question in questions:
            solution = question.solution
            said = solution.slip if dice.random() < rows.slips else solution.answer
            turns = [f"<image>{question.text}", f"<think>{sheet.read_out(solution.notes)}</think>{said}"]
            name = f"{rows.name}-{question.kind}-{len(written)}"
            written.append(dialogue(name, [file], turns) | {"answer": solution.answer, "kind": question.kind})
    return write_rows(directory / f"{rows.name}.jsonl", written)


def settings(*files: str) -> list[str]:
    """Return what every recipe has in common: its rows and the system turn."""
    train, held_out = (str(DATA / f"{name}.jsonl") for name in files)
    return [f"data.train={train}", f"data.eval={held_out}", f"data.system={SYSTEM}", "data.max_prompt_tokens=256"]


def prepare() -> Path:
    """Make the rows and the model that both ways begin with."""
    write_data(DATA, "sheets of real handwriting, four questions each", START, write_sheets, FILES)
    run, model = f"{RUNS}-sft", f"model.path={DATA / 'start'}"
    run_command("sft", str(RECIPES / "demo-sft.yaml"), model, *settings("warmup", "heldout"), f"output={run}")
    if not Path(run, "model").exists():
        run_command("export", run, "--merge")
    return Path(run, "model")


def learn(model: Path, seed: int, steps: int) -> dict[str, dict[str, Any]]:
    """Train both ways at once, and return the figures of each."""
    recipe = ["grpo", str(RECIPES / "demo-grpo.yaml"), f"model.path={model}", *settings("practice", "heldout")]
    recipe += [f"train.seed={seed}", f"train.steps={steps}"]
    runs = {way: Path(f"{RUNS}-{seed}-{way.replace(' ', '-')}") for way in WAYS}
    started = [
        subprocess.Popen([sys.executable, "-m", "tiercel", *recipe, *WAYS[way], f"output={run}"])
        for way, run in runs.items()
    ]
    if any([process.wait() for process in started]):
        raise SystemExit(f"seed {seed}: a run failed; see above")
    return {way: figures(run) for way, run in runs.items()}


def figures(run: Path) -> dict[str, Any]:
    """Return a run's accuracies before and after, with 95 % intervals, its seconds and the share of shared tokens."""
    rows = read_metrics(run)
    steps = [int(row["step"]) for row in rows if "eval/accuracy" in row]
    counts = {
        when: by_kind(read_groups(groups_path(run, "evaluations", step)))["all"]
        for when, step in (("before", steps[0]), ("after", steps[-1]))
    }
    return {
        **{when: [right / all_rows, *wilson(right, all_rows)] for when, (right, all_rows) in counts.items()},
        "seconds": sum(row.get("time/step", 0.0) for row in rows),
        "update": sum(row.get("time/learn", 0.0) for row in rows),
        "shared": float(np.mean([row["tokens/shared_fraction"] for row in rows if "tokens/shared_fraction" in row])),
    }


def table(results: dict[str, Any]) -> str:
    """Return the runs as Markdown."""
    rows = [
        [
            f"seed {seed}, {way}",
            *("{:.3f} ({:.3f} to {:.3f})".format(*found[when]) for when in ("before", "after")),
            f"{found['seconds']:.0f} s",
            f"{found['update']:.0f} s",
            f"{found['shared']:.2f}",
        ]
        for seed, ways in results["seeds"].items()
        for way, found in ways.items()
    ]
    return markdown_table(["rows", "right before", "right after", "steps", "of that, updates", "tokens shared"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    model = prepare()
    file = RESULTS / "grouped_learning.json"
    results = {"machine": machine(), "versions": versions(), "steps": options.steps, "seeds": {}}
    for seed in options.seeds:
        results["seeds"][str(seed)] = learn(model, seed, options.steps)
        write_results(file, results, table(results))
    print(table(results))


if __name__ == "__main__":
    main()
