"""Faults on purpose: crashes, full disks, damaged files, hostile input; and how many cases end as they must.

    make faults
    python -m benchmarks.faults --only "hostile images" "wrong recipes" --seed 1
    python -m benchmarks.faults --short

Writes benchmarks/results/faults.json, fault by fault, and faults.md; a short run writes nothing unless --results is
given. The exit code is 1 if a case failed.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.figure import Figure, Size
from benchmarks.peers import machine
from benchmarks.tables import RESULTS, markdown_table, versions, write_results


def attempt(name: str, size: Size, seed: int) -> Figure:
    """Return the fault's figure. A harness that breaks counts as a failure too."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tiercel-fault-", ignore_cleanup_errors=True) as work_dir:
        try:
            return FAULTS[name](size, seed, Path(work_dir))
        except Exception as error:  # the other faults should still give their figures
            traceback.print_exc()
            return Figure(
                fault=name,
                passed=0,
                attempted=1,
                seed=seed,
                seconds=time.perf_counter() - started,
                figures={},
                failures=(f"the harness failed: {type(error).__name__}: {error}",),
            )


def merged(before: Mapping[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return the results file with these figures in place of those of the same faults, in the catalogue's order."""
    known = {row["fault"]: row for row in before.get("faults", [])} | {each.fault: rounded(each) for each in figures}
    order = [*(name for name in FAULTS if name in known), *(name for name in known if name not in FAULTS)]
    return {"machine": machine(), "versions": versions(), "faults": [known[name] for name in order]}


def rounded(figure: Figure) -> dict[str, Any]:
    figures = {name: round(value, 4) for name, value in figure.figures.items()}
    return asdict(figure) | {"seconds": round(figure.seconds, 1), "figures": figures, "failures": list(figure.failures)}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table, followed by what failed."""
    table = markdown_table(
        ("fault", "passed/attempted", "seed", "seconds", "further figures"),
        [
            (
                row["fault"],
                f"{row['passed']:,}/{row['attempted']:,}",
                str(row["seed"]),
                f"{row['seconds']:.1f}",
                ", ".join(f"{name.replace('_', ' ')} {value:,g}" for name, value in row["figures"].items()),
            )
            for row in rows
        ],
    )
    failures = [f"- {row['fault']}: {line}\n" for row in rows for line in row["failures"]]
    return table + ("\nFailures:\n\n" + "".join(failures) if failures else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the form that `make test` runs")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=None, help="JSON file to merge the figures into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # some faults fork
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    figures = []
    for name in arguments.only:
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        figures.append(attempt(name, "short" if arguments.short else "full", arguments.seed))
        for line in figures[-1].failures:
            print(f"  {line}", file=sys.stderr, flush=True)
    print(markdown([rounded(figure) for figure in figures]))
    results = arguments.results or (None if arguments.short else RESULTS / "faults.json")
    if results is not None:
        before = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
        content = merged(before, figures)
        write_results(results, content, markdown(content["faults"]))
    return int(any(figure.passed < figure.attempted for figure in figures))


if __name__ == "__main__":
    raise SystemExit(main())
