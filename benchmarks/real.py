"""`tiercel demo --real` by seed, with the figures of its kinds of questions in benchmarks/results/real.json.

make demo-real                       the demo, which is seed 0, and then this for it alone
python -m benchmarks.real --seeds 0 1     other seeds are trained first, each in minutes
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.demo.real import CONTROL, DATA, RECIPE, RUN, TEST, demo_real, without_picture
from tiercel.demo.real_parts import KINDS
from tiercel.demo.results import Counts, before_after_control
from tiercel.demo.running import RECIPES, run_command
from tiercel.runs.directory import read_metrics
from tiercel.training.evaluation import wilson

FILE = RESULTS / "real.json"


def figures(run: Path, control: Path) -> dict[str, Any]:
    """Return the accuracies of a run by kind, and the seconds that its steps took."""
    before, after, other = before_after_control(run, control)
    named = {"before": before, "after": after, "another picture": other, "no picture": without_picture(TEST)}
    rows = read_metrics(run)
    return {
        "steps": rows[-1]["step"],
        "seconds": round(sum(row.get("time/step", 0.0) for row in rows)),
        **{name: {kind: shares(counts, kind) for kind in (*KINDS, "all")} for name, counts in named.items()},
    }


def shares(counts: Counts, kind: str) -> list[float]:
    """Return an accuracy and its 95 % interval."""
    right, count = counts[kind]
    return [round(value, 3) for value in (right / count, *wilson(right, count))]


def train(seed: int) -> tuple[Path, Path]:
    """Train with a seed unless that was done, and return the run and the control's file."""
    if seed == 0:
        if not CONTROL.is_file():
            demo_real()
        return RUN, CONTROL
    run, control = RUN.with_name(f"{RUN.name}-{seed}"), DATA / f"control-{seed}.jsonl"
    recipe = str(RECIPES / RECIPE)
    run_command("grpo", recipe, f"train.seed={seed}", f"output={run}")
    if not control.is_file():
        adapter = max((run / "checkpoints").iterdir()) / "adapter"
        rows = f"data.eval={DATA / 'test-swapped.jsonl'}"
        run_command("eval", recipe, rows, "--adapter", str(adapter), "--output", str(control))
    return run, control


def table(results: dict[str, Any]) -> str:
    """Return the accuracies as Markdown."""
    rows = []
    for seed, found in results["seeds"].items():
        for kind in (*KINDS, "all"):
            cells = [
                "{:.3f} ({:.3f} to {:.3f})".format(*found[name][kind])
                for name in ("before", "after", "another picture")
            ]
            rows.append([f"seed {seed}: {kind}", *cells, f"{found['no picture'][kind][0]:.3f}"])
    return markdown_table(["", "before", "after", "another picture", "no picture"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    seeds = parser.parse_args().seeds
    results = {
        "machine": machine(),
        "versions": versions(),
        "rows": 4 * TEST.per_kind,
        "seeds": {str(seed): figures(*train(seed)) for seed in seeds},
    }
    write_results(FILE, results, table(results))
    print(table(results))


if __name__ == "__main__":
    main()
