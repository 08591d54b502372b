"""Compile the attention of learner and decoder for every card, head size and dtype, on null GPUs.

    python -m benchmarks.kernels [--cards h100,4090] [--sizes 64,128] [--dtypes bfloat16]

Rows are written as they come. An existing row is not made again, unless torch, Triton or the tiles have changed. Each
row names the mask function that was compiled into its kernels; a row with another one stays until it is made again.
"""

import argparse
import hashlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.tables import RESULTS, markdown_table
from tests.nullgpu.card import CARDS, ROOT, environment_of
from tiercel.packing.attention import block_mask
from tiercel.packing.attention.flex import KERNELS
from tiercel.packing.kernel_table import FILE, KernelFit, read_fits
from tiercel.runs.files import write_atomically

HEADS, KEY_HEADS = 16, 4
SIZES = (64, 80, 96, 128, 192, 256, 512)
DTYPES = ("bfloat16", "float16", "float32")
# Sizes of heads by family, of published models in bfloat16.
FAMILIES: dict[str, tuple[int, ...]] = {
    "qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe": (128,),
    "qwen3_5, qwen3_5_moe": (256,),
    "gemma3": (128, 256),
    "gemma4": (256, 512),
    "ovis2, internvl, llava_onevision": (64, 128),
}
Row = Mapping[str, Any]


def tiles() -> dict[str, Any]:
    """Return the options of the kernels by bytes of a number and head size, in the form that JSON gives back."""
    return {str(width): {str(size): each.options for size, each in of.items()} for width, of in KERNELS.items()}


def made_with() -> dict[str, Any]:
    """Return what rows are valid for."""
    return {"torch": version("torch").partition("+")[0], "triton": version("triton"), "tiles": tiles()}


def mask_digest() -> str:
    """Return a name of the mask function, which changes whenever its text does."""
    return hashlib.sha256(inspect.getsource(block_mask._sees).encode()).hexdigest()[:12]


@dataclass(slots=True)
class Table:
    """The rows of the file, by card, size and dtype."""

    file: Path
    stamp: Row
    rows: dict[tuple[str, int, str], Row] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path, stamp: Row) -> "Table":
        """Read a file. Its rows are dropped if they were made with something else."""
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        rows = content["rows"] if content.get("made_with") == stamp else []
        return cls(file, stamp, {(row["card"], row["head_size"], row["dtype"]): row for row in rows})

    def lacks(self, card: str, size: int, dtype: str, mask: str) -> bool:
        """Return whether there is no such row with this mask function."""
        return self.rows.get((card, size, dtype), {}).get("mask") != mask

    def put(self, row: Row) -> None:
        """Add a row, and write the file and its Markdown."""
        self.rows[row["card"], row["head_size"], row["dtype"]] = row
        rows = sorted(self.rows.values(), key=_place)
        lines = ",\n".join(json.dumps(each) for each in rows)
        write_atomically(self.file, f'{{"made_with": {json.dumps(self.stamp)},\n"rows": [\n{lines}\n]}}\n')
        fits = read_fits(self.file)
        write_atomically(RESULTS / "kernels.md", markdown(fits))
        write_atomically(RESULTS / "kernels_families.md", families_markdown(fits))


def _place(row: Row) -> tuple[int, int, int]:
    return CARDS.index(row["card"]), row["head_size"], DTYPES.index(row["dtype"])


def markdown(fits: Sequence[KernelFit]) -> str:
    """Return the bytes that a thread spills in the forward and the backward pass, or that a card refuses the
    kernels."""
    cards = [card for card in CARDS if any(fit.card == card for fit in fits)]
    cells = {(fit.card, fit.head_size, fit.dtype): _cell(fit) for fit in fits}
    rows = [
        [f"{size}, {dtype}", *(cells.get((card, size, dtype), "") for card in cards)]
        for size in SIZES
        for dtype in DTYPES
        if any((card, size, dtype) in cells for card in cards)
    ]
    return markdown_table(["heads", *cards], rows)


def families_markdown(fits: Sequence[KernelFit]) -> str:
    """Return for each family and card whether it runs, or the sizes of heads that are refused. A cell is empty if a
    size was not tried."""
    by_place = {(fit.card, fit.head_size): fit.problem for fit in fits if fit.dtype == "bfloat16"}

    def cell(card: str, sizes: Sequence[int]) -> str:
        problems = {size: by_place.get((card, size)) for size in sizes}
        refused = [str(size) for size, problem in problems.items() if problem]
        if refused:
            return f"refused, heads of {' and '.join(refused)}"
        return "" if None in problems.values() else "runs"

    rows = [[name, *(cell(card, sizes) for card in CARDS)] for name, sizes in FAMILIES.items()]
    return markdown_table(["family", *CARDS], rows)


def _cell(fit: KernelFit) -> str:
    return "refused" if fit.problem else " / ".join(f"{each:,}" for each in fit.stack_bytes)


def compiled(card: str, wanted: Sequence[tuple[int, str]]) -> Iterator[Row]:
    """Compile on a null card for each size and dtype, in one process."""
    shapes = [f"{HEADS},{KEY_HEADS},{size},{dtype}" for size, dtype in wanted]
    command = [sys.executable, "-m", "tests.nullgpu.flex", *shapes]
    with subprocess.Popen(command, cwd=ROOT, env=environment_of(card), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = (json.loads(line) for line in process.stdout if line.startswith("{"))
        for (size, dtype), found in zip(wanted, lines, strict=False):
            del found["shape"]
            yield {"card": card, "head_size": size, "dtype": dtype, "mask": mask_digest(), **found}
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} on {card} ended with code {process.returncode}")


def main(arguments: Sequence[str]) -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description="compile the attention kernels for null cards")
    for name, known in (("cards", CARDS), ("sizes", SIZES), ("dtypes", DTYPES)):
        parser.add_argument(f"--{name}", default=",".join(map(str, known)))
    asked = parser.parse_args(arguments)
    table = Table.read(FILE, made_with())
    pairs = [(int(size), dtype) for size in asked.sizes.split(",") for dtype in asked.dtypes.split(",")]
    for card in asked.cards.split(","):
        wanted = [(size, dtype) for size, dtype in pairs if table.lacks(card, size, dtype, mask_digest())]
        for row in compiled(card, wanted) if wanted else ():
            table.put(row)
            print(card, row["head_size"], row["dtype"], row["problem"] or "fits", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
