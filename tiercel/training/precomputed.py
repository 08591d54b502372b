"""The reference's logprobs of all pairs, computed before the first step and kept in the run directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tiercel.config.parts import whole_parts
from tiercel.config.schema import DpoRecipe, OfflineRecipe
from tiercel.data.order import RowOrder
from tiercel.data.reading import RowTable
from tiercel.errors import RunError
from tiercel.learner.examples import Bundle
from tiercel.runs.waiting import waiting
from tiercel.training.heldout_loss import sums_of
from tiercel.training.objectives import Known
from tiercel.training.session import Session
from tiercel.training.trainer import Trainer
from tiercel.writing import GO_ON, writing

FILE = "reference.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Precomputed:
    """The reference's sums of every row, by its number. `train` is None where each step computes its own."""

    train: Known | None = None
    heldout: Known | None = None

    def of(self, made: list[Bundle], order: RowOrder) -> Known | None:
        """Look up a step's examples, by their index."""
        if self.train is None:
            return None
        indices = [example.prompt.index for bundle in made for example in bundle.examples]
        return {index: self.train[order.row(index)] for index in indices}


def precomputed(recipe: OfflineRecipe, session: Session, trainer: Trainer) -> Precomputed:
    """Compute the reference of all rows, or read what the run computed before; nothing where the recipe does not want
    that. Raises RunError where the start of a run that trains whole weights cannot be computed any more."""
    if not isinstance(recipe, DpoRecipe) or not recipe.dpo.precompute_reference:
        return Precomputed()
    file, ranks = session.run.path / FILE, session.ranks
    tables = {"train": session.table} | ({"heldout": session.read.heldout} if session.read.heldout is not None else {})
    identity = _identity(recipe, tables)
    found = ranks.on_first(lambda: _read(file, identity))
    if found is None:
        if session.start > 0 and whole_parts(recipe):
            raise RunError(f"{file} is missing or of other rows, and its run has changed the weights; start it anew")
        ranks.pulse.begin("reference", session.start)
        with waiting(session.say, "computing the reference of all pairs"), trainer.as_reference():
            found = {name: sums_of(trainer, recipe, table) for name, table in tables.items()}
        ranks.on_first(lambda: _write(file, identity, found))
    return Precomputed(train=found["train"], heldout=found.get("heldout"))


def _identity(recipe: OfflineRecipe, tables: Mapping[str, RowTable]) -> str:
    """Hash what the sums depend on: the rows with all their columns, and the model."""
    rows = [[row.id, repr(row.messages), repr(row.rejected)] for table in tables.values() for row in table.rows]
    model = [
        recipe.model.model_dump(mode="json"),
        recipe.lora and recipe.lora.init,
        recipe.data.model_dump(mode="json"),
    ]
    return sha256(json.dumps([model, rows]).encode()).hexdigest()


def _read(file: Path, identity: str) -> dict[str, dict[int, Tensor]] | None:
    if not file.is_file():
        return None
    with safe_open(file, "pt") as opened:
        if opened.metadata().get("identity") != identity:
            return None
        names = {name.rpartition(".")[0] for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        return {
            name: dict(zip(opened.get_tensor(f"{name}.rows").tolist(), opened.get_tensor(f"{name}.sums"), strict=True))
            for name in names
        }


def _write(file: Path, identity: str, found: Mapping[str, Mapping[int, Tensor]]) -> None:
    tensors = {}
    for name, sums in found.items():
        rows = sorted(sums)
        tensors[f"{name}.rows"] = torch.tensor(rows)
        tensors[f"{name}.sums"] = torch.stack([sums[row] for row in rows]) if rows else torch.empty(0, 2)
    whole = file.with_suffix(".tmp")
    with writing(file, GO_ON):
        save_file(tensors, whole, metadata={"identity": identity})
        whole.replace(file)
