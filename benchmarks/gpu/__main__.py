"""tiercel on one CUDA GPU, part by part. Every cell's result is written as soon as it is done.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --part a --seconds 420
    python -m benchmarks.gpu --part c --only 7b
    python -m benchmarks.gpu --toy

A cell that has a row of the same card and commit in the results is skipped, so the same command continues where the
last one ended. After --seconds no further cell starts. Exit code 0: all cells are done; 1: a check differs or a cell
failed; 3: cells are left. docs/benchmarks.md says what each part measures and which packages a machine needs.
"""

import argparse
import re
import sys
import warnings
from pathlib import Path

from transformers.utils import logging

from benchmarks.gpu.parts import PARTS, all_cells
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import Cell, run_cells, title
from benchmarks.gpu.setup import on_a_card, on_a_cpu
from benchmarks.tables import RESULTS

WRONG, LEFT = 1, 3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = "; ".join(f"{part.letter}: {part.title}" for part in PARTS)
    parser.add_argument("--part", choices=[part.letter for part in PARTS], action="append", help=parts)
    parser.add_argument("--only", default="", metavar="WORDS", help="cells whose name matches, a regular expression")
    parser.add_argument("--seconds", type=float, default=420, help="no further cell begins after them (420)")
    parser.add_argument("--again", action="store_true", help="measure cells anew that have a row")
    parser.add_argument("--list", action="store_true", help="print the cells, and end")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on a CPU, in seconds")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/gpu.json; with --toy, gpu-toy.json")
    return parser.parse_args(arguments)


def chosen(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells that the arguments name, in order."""
    cells = all_cells(is_toy=arguments.toy)
    parts = arguments.part or [part.letter for part in PARTS]
    return [cell for cell in cells if cell.part in parts and re.search(arguments.only, cell.name)]


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    cells = chosen(arguments)
    if arguments.list:
        print("\n".join(map(title, cells)))
        return 0
    if not cells:
        raise SystemExit(f"--only {arguments.only}: no cell of these parts matches; --list prints them")
    setup = on_a_cpu() if arguments.toy else on_a_card()
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing(_enable|_disable)?` is deprecated")
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    logging.disable_progress_bar()
    results = Results.read(arguments.results or RESULTS / ("gpu-toy.json" if arguments.toy else "gpu.json"))
    ended = run_cells(cells, setup, results, arguments.seconds, arguments.again)
    print(results.file.with_suffix(".md").read_text(encoding="utf-8") if results.rows else "")
    for each in ended.left:
        print(f"left: {each}")
    for each in ended.wrong:
        print(f"wrong: {each}")
    return LEFT if ended.left else WRONG if ended.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
