"""The parts of the proof, in the order in which they are worth a card's time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.decoding import decoding_cells
from benchmarks.gpu.exactness import exactness_cells
from benchmarks.gpu.killed import killed_cells
from benchmarks.gpu.learning import compile_cells, learner_cells
from benchmarks.gpu.running import Cell
from benchmarks.gpu.trl_learner import trl_cells
from benchmarks.gpu.whole_steps import step_cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Cells that belong together. `cells` is called with whether shapes are toys."""

    letter: str
    title: str
    cells: Callable[[bool], Iterator[Cell]]


def _learners(is_toy: bool) -> Iterator[Cell]:
    yield from learner_cells(is_toy)
    yield from trl_cells(is_toy)


PARTS = (
    Part(letter="a", title="exactness", cells=exactness_cells),
    Part(letter="b", title="runs that are killed and resumed", cells=killed_cells),
    Part(letter="c", title="the learner against plain transformers and TRL", cells=_learners),
    Part(letter="d", title="decoding against the memory's bandwidth", cells=decoding_cells),
    Part(letter="e", title="whole steps", cells=step_cells),
    Part(letter="f", title="what torch.compile gives", cells=compile_cells),
)


def all_cells(is_toy: bool) -> list[Cell]:
    """Return the cells of all parts, in order."""
    return [cell for part in PARTS for cell in part.cells(is_toy)]
