"""The run of `tiercel demo --real` by tiercel, TRL and ms-swift: reward and held-out accuracy by step, and seconds.

    make bench-real-peers                                   three seeds, one after the other; half an hour each
    .venv-real/bin/python -m benchmarks.real_peers --seeds 0 --sides tiercel trl --steps 20

All start from the model of the demo with the same rows in the order that tiercel drew them, and have its reward, group,
lengths and learning rate. Every fifth step, `tiercel eval` scores each side's adapter on the demo's held-out questions.
What a side has finished is not run again, and seeds that the results file has of the same machine, versions and steps
stay. Writes benchmarks/results/real_peers.json and .md, and the curves as docs/real_peers.svg, which needs matplotlib.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drivers.real_task import PROMPTS_PER_STEP, SAVE_EVERY
from benchmarks.peers import PYTHONS, ROOT, machine
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.demo.real import DATA, PRACTICE, RECIPE, TEST, make_model
from tiercel.demo.real_parts import write_sample
from tiercel.demo.results import by_kind, read_groups
from tiercel.demo.running import RECIPES, require_recipes, run_command
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import groups_path
from tiercel.training.evaluation import wilson

FILE = RESULTS / "real_peers.json"
RUNS = Path("runs/real-peers")
SIDES = {"tiercel": "tiercel", "trl": "TRL", "swift": "ms-swift"}
LAST = 10  # steps whose mean reward the table has
SEEN = ("shape", "color")  # kinds of questions that need the picture; yes or no is mostly known without
GOAL = 0.85  # of them right


def prepare() -> None:
    """Make the model and the rows, as the demo does."""
    require_recipes(RECIPE)
    if not (DATA / "test.jsonl").exists():
        make_model(DATA / "start")
        for sample in (PRACTICE, TEST):
            write_sample(DATA, sample)


def by_tiercel(run: Path, seed: int, steps: int) -> None:
    """Train with tiercel, which scores the held-out rows itself."""
    settings = {"seed": seed, "steps": steps, "eval_every": SAVE_EVERY, "threads": "null"}  # as many as the peers'
    given = [f"train.{key}={value}" for key, value in settings.items()]
    run_command("grpo", str(RECIPES / RECIPE), *given, f"output={run}")


def rows_in_order(run: Path, steps: int) -> Path:
    """Write the rows of tiercel's steps in their order, as the peers read them."""
    by_id = {row["id"]: row for row in map(json.loads, (DATA / "practice.jsonl").read_text().splitlines())}
    rows = []
    for step in range(1, steps + 1):
        groups = read_groups(groups_path(run, "rollouts", step))
        if len(groups) != PROMPTS_PER_STEP:
            raise SystemExit(f"{run}: step {step} has {len(groups)} groups; {PROMPTS_PER_STEP} are compared")
        rows += [by_id[group.id] for group in groups]
    file = run.parent / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "question": row["messages"][0]["content"].removeprefix("<image>\n"),
                    "picture": str((DATA / row["images"][0]).resolve()),
                    "answer": row["answer"],
                }
            )
            + "\n"
            for row in rows
        ),
        encoding="utf-8",
    )
    return file


def by_peer(side: str, out: Path, rows: Path, seed: int, steps: int) -> None:
    """Train with a peer in its own environment, and score its adapters with tiercel."""
    adapters = {step: out / f"checkpoint-{step}" for step in range(SAVE_EVERY, steps + 1, SAVE_EVERY)}
    if not all(adapter.is_dir() for adapter in adapters.values()):
        options = ["--model", DATA / "start", "--rows", rows, "--out", out, "--steps", steps, "--seed", seed]
        command = [ROOT / PYTHONS[side], "-m", f"benchmarks.drivers.{side}_real", *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(list(map(str, command)), check=True, env=environment)
    for step, adapter in adapters.items():
        if not (scored := out / f"evaluation-{step}.jsonl").is_file():
            run_command("eval", str(RECIPES / RECIPE), "--adapter", str(adapter), "--output", str(scored))


def accuracies(files: dict[int, Path]) -> list[dict[str, Any]]:
    """Return for each step the accuracies, with 95 % intervals, of the questions that need the picture and of all."""
    found = []
    for step, file in files.items():
        counts = by_kind(read_groups(file))
        seen = [sum(counts[kind][place] for kind in SEEN) for place in (0, 1)]
        shares = {name: [c[0] / c[1], *wilson(*c)] for name, c in (("seen", seen), ("all", counts["all"]))}
        found.append({"step": step, **shares})
    return found


def figures(side: str, run: Path, first: Path, steps: int) -> dict[str, Any]:
    """Return a side's rewards and seconds of each step, and the accuracies that its evaluations found. Step 0 is
    tiercel's for all, because all start from the same model."""
    scored = {0: groups_path(first, "evaluations", 0)}
    places = range(SAVE_EVERY, steps + 1, SAVE_EVERY)
    if side == "tiercel":
        rows = [row for row in read_metrics(run) if "reward/mean" in row]
        rewards, seconds = [row["reward/mean"] for row in rows], [row["time/step"] for row in rows]
        scored |= {step: groups_path(run, "evaluations", step) for step in places}
    else:
        rows = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        rewards, seconds = [row["reward"] for row in rows], [row["seconds"] for row in rows]
        scored |= {step: run / f"evaluation-{step}.jsonl" for step in places}
    found = accuracies(scored)
    reached = next((each["step"] for each in found if each["seen"][0] >= GOAL), None)
    return {
        "rewards": rewards,
        "seconds": seconds,
        "accuracy": found,
        "seconds_to_goal": None if reached is None else sum(seconds[:reached]),
    }


def table(results: dict[str, Any]) -> str:
    """Return the runs as Markdown."""
    rows = []
    for seed, sides in results["seeds"].items():
        for side, found in sides.items():
            last = found["accuracy"][-1]
            reached = found["seconds_to_goal"]
            rows.append(
                [
                    f"seed {seed}, {SIDES[side]}",
                    f"{statistics.mean(found['rewards'][:LAST]):.3f}",
                    f"{statistics.mean(found['rewards'][-LAST:]):.3f}",
                    *("{:.3f} ({:.3f} to {:.3f})".format(*last[name]) for name in ("seen", "all")),
                    f"{statistics.median(found['seconds']):.1f} s",
                    "not reached" if reached is None else f"{reached:.0f} s",
                ]
            )
    titles = [f"reward, first {LAST} steps", f"last {LAST}", "shape and color right at the end", "all right"]
    return markdown_table(["", *titles, "a step", f"until {GOAL} of shape and color"], rows)


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw reward and accuracy by step, and accuracy by seconds, with a line for each seed of a side."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    reward, by_step, by_seconds = figure.subplots(1, 3)
    for number, side in enumerate(SIDES):
        for found in (sides[side] for sides in results["seeds"].values() if side in sides):
            line: dict[str, Any] = {"color": f"C{number}", "label": SIDES[side], "alpha": 0.8}
            ends = range(1, results["steps"] + 1)
            reward.plot(ends, [statistics.mean(found["rewards"][max(0, end - LAST) : end]) for end in ends], **line)
            steps = [each["step"] for each in found["accuracy"]]
            seen = [each["seen"][0] for each in found["accuracy"]]
            by_step.plot(steps, seen, marker=".", **line)
            by_seconds.plot([sum(found["seconds"][:step]) for step in steps], seen, marker=".", **line)
    reward.set(xlabel="step", ylabel=f"reward, mean of {LAST} steps")
    by_step.set(xlabel="step", ylabel="held-out shape and color right")
    by_seconds.set(xlabel="seconds of steps", ylabel="held-out shape and color right")
    for panel in (by_step, by_seconds):
        panel.axhline(GOAL, color="gray", linewidth=0.8, linestyle=":")
    lines, names = reward.get_legend_handles_labels()
    reward.legend(*zip(*{name: (line, name) for line, name in zip(lines, names, strict=True)}.values(), strict=True))
    figure.savefig(file, metadata={"Date": None})


def learn(seed: int, sides: Sequence[str], steps: int) -> dict[str, Any]:
    """Run what is missing of a seed, and return the figures of its sides."""
    first = RUNS / str(seed) / "tiercel"
    by_tiercel(first, seed, steps)
    rows = rows_in_order(first, steps)
    for side in sides:
        if side != "tiercel":
            by_peer(side, first.with_name(side), rows, seed, steps)
    return {side: figures(side, first.with_name(side), first, steps) for side in sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=list(SIDES))
    parser.add_argument("--steps", type=int, default=30, help="a multiple of five")
    options = parser.parse_args()
    prepare()
    head = {"machine": machine(), "versions": versions(), "steps": options.steps}
    before = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    kept = before["seeds"] if {name: before.get(name) for name in head} == head else {}
    results: dict[str, Any] = {**head, "seeds": kept}
    for seed in options.seeds:
        results["seeds"].setdefault(str(seed), {}).update(learn(seed, options.sides, options.steps))
        write_results(FILE, results, table(results))
    draw(results, ROOT / "docs/real_peers.svg")
    print(table(results))


if __name__ == "__main__":
    main()
