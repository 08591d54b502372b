"""Every fault by name."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.faults.canaries import canaries
from benchmarks.faults.crashes import crashes
from benchmarks.faults.damage import damage
from benchmarks.faults.escapes import escapes
from benchmarks.faults.figure import Figure, Size
from benchmarks.faults.full_disks import full_disks
from benchmarks.faults.fuzzed_rows import fuzzed_rows
from benchmarks.faults.hostile_images import hostile_images
from benchmarks.faults.wrong_recipes import wrong_recipes

# (size, seed, an empty directory of its own) -> Figure
FAULTS: dict[str, Callable[[Size, int, Path], Figure]] = {
    "crash at every file operation of a save": crashes,
    "disk full at every file of a save": full_disks,
    "damaged checkpoint files": damage,
    "hostile images": hostile_images,
    "fuzzed rows": fuzzed_rows,
    "pickle canaries in every loadable slot": canaries,
    "path and URL escapes": escapes,
    "wrong recipes": wrong_recipes,
}
