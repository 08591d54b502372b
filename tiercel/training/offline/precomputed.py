"""The reference's logprobs of all pairs, computed before the first step and kept in the run directory."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from os.path import expanduser, isdir, realpath
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tiercel.config import flatten
from tiercel.config.conflicts.paths import PATH_CHECKS
from tiercel.config.keys import declared_name
from tiercel.config.schema import DpoRecipe, OfflineRecipe
from tiercel.config.trained_parts import whole_parts
from tiercel.data.order import RowOrder
from tiercel.data.picture_files import beginning, files_of
from tiercel.data.row_table import RowTable
from tiercel.data.stores import view_of
from tiercel.distributed.ranks import Ranks
from tiercel.errors import RunError, TrainingError
from tiercel.packing.examples import ExampleGroup
from tiercel.regular_files import open_new, require_regular
from tiercel.runs.files import file_sha256
from tiercel.runs.identity import may_differ
from tiercel.runs.progress import waiting
from tiercel.training.offline.heldout_loss import sums_of
from tiercel.training.offline.objectives import ReferenceSums
from tiercel.training.session import Session
from tiercel.training.trainer import Trainer
from tiercel.types import ImageRoots, RejectedRow
from tiercel.writing import GO_ON, NOT_OURS, reading, writing

FILE = "reference.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceCache:
    """The reference's sums of every row, by its number. `train` is None if each step computes its own."""

    train: ReferenceSums | None = None
    heldout: ReferenceSums | None = None

    def of(self, groups: list[ExampleGroup], order: RowOrder, ranks: Ranks) -> ReferenceSums | None:
        """Look up a step's examples, of all ranks, by their index: ranks that compute a row together need each
        other's."""
        if self.train is None:
            return None
        own = [(example.prompt.index, example.prompt.row.id) for group in groups for example in group.examples]
        found = {}
        for index, id in (pair for pairs in ranks.all_gather(own) for pair in pairs):
            if (number := order.row(index)) not in self.train:
                raise TrainingError(
                    f"row {id} was rejected when the reference of all rows was computed, but can be used now; remove "
                    f"{FILE} from the run, and the next start computes it again"
                )
            found[index] = self.train[number]
        return found


def load_or_compute_reference(recipe: OfflineRecipe, session: Session, trainer: Trainer) -> ReferenceCache:
    """Compute the reference of all rows, or read what the run computed before; empty if the recipe does not want it.
    Raises RunError if a run that trains whole weights has changed them, so that its start can no longer be computed."""
    if not isinstance(recipe, DpoRecipe) or not recipe.dpo.precompute_reference:
        return ReferenceCache()
    file, ranks = session.run.path / FILE, session.ranks
    tables = {"train": session.table} | ({"heldout": session.rows.heldout} if session.rows.heldout is not None else {})
    identity = ranks.run_on_first(lambda: _identity(recipe, tables, ranks.heartbeat.beat))
    found = ranks.run_on_first(lambda: _read(file, identity))
    if found is None:
        if session.start > 0 and whole_parts(recipe):
            raise RunError(
                f"{file} is missing or was computed for other rows, pictures or another data.template, and the "
                "reference cannot be computed again, because training has changed its weights; start a new run in "
                "another output"
            )
        ranks.heartbeat.begin("reference", session.start)
        with waiting("computing the reference of all pairs"), trainer.as_reference():
            found = {name: sums_of(trainer, recipe, table) for name, table in tables.items()}
        ranks.run_on_first(lambda: _write(file, identity, found))
    return ReferenceCache(train=found["train"], heldout=found.get("heldout"))


def _identity(recipe: OfflineRecipe, tables: Mapping[str, RowTable], beat: Callable[[], None]) -> str:
    """Hash what the sums depend on: the rows, the files of their pictures, and the model."""
    # Rows are hashed whole: both sides, boxes, columns, and pictures in the row itself. Of a picture file the size and
    # the first bytes are hashed, but not the time, which copying the data changes. Of the adapter at lora.init all
    # bytes are hashed, of the checkpoint only the path.
    digest = sha256(json.dumps(_described(recipe)).encode())
    if recipe.data.template is not None:
        digest.update(file_sha256(Path(expanduser(recipe.data.template))).encode())
    if isinstance(recipe, DpoRecipe) and recipe.dpo.ld_alpha is not None:
        digest.update(f"ld_alpha {recipe.dpo.ld_alpha}".encode())
    if recipe.lora is not None and recipe.lora.init is not None:
        adapter = Path(recipe.lora.init).iterdir()  # with the parts trained whole next to it
        for file in sorted(each for each in adapter if each.suffix in (".json", ".safetensors")):
            digest.update(file_sha256(file).encode())
    pictures: dict[tuple[str, ImageRoots], None] = {}
    views = [view_of(table.rows) for table in tables.values()]
    for row in (view.look(number) for view in views for number in range(len(view))):
        beat()
        if isinstance(row, RejectedRow):  # of an indexed file, since its index was made
            digest.update(repr(replace(row, file="")).encode())
            continue
        for side in row.sides:
            digest.update(repr(replace(side, rejected=None, file="", image_roots=ImageRoots())).encode())
            pictures.update(dict.fromkeys(files_of(side)))
    for path, roots in pictures:
        beat()
        digest.update(beginning(path, roots))
    return digest.hexdigest()


def _described(recipe: OfflineRecipe) -> dict[str, Any]:
    """Return the values of `model` and `data`, except those that may change when a run resumes, and except paths of
    rows, which may be written differently: the rows themselves are hashed."""
    values = flatten(recipe).items()
    kept = {key: value for key, value in values if key.startswith(("model.", "data.")) and not may_differ(key)}
    kept["model.path"] = realpath(recipe.model.path) if isdir(recipe.model.path) else recipe.model.path
    return {key: value for key, value in kept.items() if key == "model.path" or declared_name(key) not in PATH_CHECKS}


def _read(file: Path, identity: str) -> dict[str, dict[int, Tensor]] | None:
    if not os.path.lexists(file):
        return None
    with reading(file):
        require_regular(file)
    try:
        return _found(file, identity)
    except (SafetensorError, LookupError) as error:
        raise RunError(f"{file} does not contain the reference of all pairs: {error}; {NOT_OURS}") from error


def _found(file: Path, identity: str) -> dict[str, dict[int, Tensor]] | None:
    with safe_open(file, "pt") as opened:
        if (opened.metadata() or {}).get("identity") != identity:
            return None
        names = {name.rpartition(".")[0] for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
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
        with open_new(whole, "wb") as stream:
            stream.write(save(tensors, metadata={"identity": identity}))
        whole.replace(file)
