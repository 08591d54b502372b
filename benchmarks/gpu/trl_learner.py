"""Part c's peer: TRL's own GRPO trainer with the same shapes of weights, pictures, LoRA layers and lengths.

A step of TRL has one prompt here. Its groups share nothing, so a step of several groups takes that many times as long.
Its rollout, by transformers' generation, is not counted for the learner.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.learning import Place, places
from benchmarks.gpu.running import Cell, NotHere
from benchmarks.gpu.setup import Setup


def trl_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield cells with and without activation checkpointing, for prompts with a picture."""
    for place in places(is_toy):
        if place.shape.side:
            for is_checkpointed in (False, True):
                name = f"{place.title}, TRL" + (", full checkpointing" if is_checkpointed else "")
                yield Cell(part="c", name=name, run=partial(measured, place, is_checkpointed))


def measured(place: Place, is_checkpointed: bool, setup: Setup) -> dict[str, Any]:
    """Return the seconds of TRL's learner. Raises NotHere if TRL cannot be imported."""
    try:
        from benchmarks.gpu import trl_trainer
    except ImportError as error:
        raise NotHere(f"TRL is not installed: {error}") from error
    return trl_trainer.measure(place, is_checkpointed, setup)
