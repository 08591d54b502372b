"""Microbatches of an update that was not finite, as a file of tensors that `tiercel replay` recomputes.

The file is safetensors. Its tensors are named by their place in the units; everything else is JSON in its header.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tiercel.algorithms import Totals
from tiercel.errors import RunError
from tiercel.packing.batch import CompletionName, MicrobatchUnit, PolicyBatch, PolicyPrefix
from tiercel.packing.divergence import TeacherTokens
from tiercel.packing.layout import PackedTokens
from tiercel.packing.tree import Node, PrefixTree
from tiercel.regular_files import require_regular
from tiercel.reliability.redaction import redact_values
from tiercel.training.grpo.precomputed_values import PrecomputedValues
from tiercel.training.nonfinite_guard import MICROBATCHES
from tiercel.training.offline.objectives import UpdateInputs
from tiercel.types import EncodedImage, ImagePlan
from tiercel.writing import NOT_OURS

HEADER = "kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptUnit:
    """Microbatches that run together, with what was known of each before the update."""

    unit: MicrobatchUnit
    known: tuple[PrecomputedValues, ...]

    def of_rows(self) -> Iterator[tuple[str, "KeptUnit"]]:
        """Yield each row by itself, with its id."""
        names = [(name.row, name.index) for batch in self.unit.batches for name in batch.names_C]
        for row in dict.fromkeys(names):
            yield row[0], _one_row(self, row)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptPlan:
    """What was known, before the update, of a step's examples in a run that learns from the rows' own answers."""

    indices: tuple[int, ...]
    reference: tuple[Tensor, ...]  # of the examples with these indices
    examples: int
    tokens: int
    first_tokens: int
    divergence: float
    matched: tuple[tuple[float, float], ...] = ()  # for AOT, of the same examples
    state: Mapping[str, float]  # of the objective

    @property
    def known(self) -> dict[int, Tensor]:
        return dict(zip(self.indices, self.reference, strict=True))

    @property
    def matched_values(self) -> dict[int, tuple[float, float]]:
        return dict(zip(self.indices, self.matched, strict=True)) if self.matched else {}


_KINDS: tuple[type, ...] = (
    KeptUnit,
    MicrobatchUnit,
    PolicyPrefix,
    PolicyBatch,
    PrecomputedValues,
    CompletionName,
    Totals,
    TeacherTokens,
    KeptPlan,
)
_KINDS += (PackedTokens, PrefixTree, Node, EncodedImage, ImagePlan)
_OLD_NAMES = ("PolicyUnit", "Microbatches")  # of MicrobatchUnit in files of older versions
CLASSES = {kind.__name__: kind for kind in _KINDS} | dict.fromkeys(_OLD_NAMES, MicrobatchUnit)


def serialize_microbatches(
    units: Sequence[MicrobatchUnit], known: Sequence[Sequence[PrecomputedValues]], places: Sequence[int] | None
) -> bytes:
    """Serialise the units that have one of these microbatches, numbered over all units; b"" if none has."""
    kept, start = [], 0
    for unit, each in zip(units, known, strict=True):
        stop = start + len(unit.batches)
        is_asked = places is None or any(start <= place < stop for place in places)
        if is_asked and unit.batches[0].prompt_ids:
            kept.append(KeptUnit(unit=unit, known=tuple(each)))
        start = stop
    return _written(kept)


def serialize_update_inputs(inputs: UpdateInputs, state: Mapping[str, float], places: Sequence[int] | None) -> bytes:
    """Serialise what a plan knows of its examples that the step's rows do not say; also of those that other ranks
    compute together with this one."""
    indices = tuple(inputs.reference)
    kept = KeptPlan(
        indices=indices,
        reference=tuple(inputs.reference[index] for index in indices),
        examples=inputs.examples,
        tokens=inputs.tokens,
        first_tokens=inputs.first_tokens,
        divergence=inputs.divergence,
        matched=tuple(inputs.matched[index] for index in indices) if inputs.matched else (),
        state=dict(state),
    )
    return _written([kept])


def load_saved_update(directory: Path, device: torch.device) -> list[Any]:
    """Read the KeptUnits or the KeptPlans of all ranks. Raises RunError if there are none."""
    files = sorted(directory.glob(MICROBATCHES.format(rank=0).replace("000", "*")))
    if not files:
        raise RunError(f"{directory} has no microbatches to compute again; it was kept by an older version of tiercel")
    kept = []
    for file in files:
        try:
            require_regular(file)
            with safe_open(file, "pt") as opened:
                tree = json.loads(opened.metadata()[HEADER])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
            kept += _value(tree, tensors)
        except (OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise RunError(f"{file} does not contain the microbatches of an update: {error}; {NOT_OURS}") from error
    return [_on(each, device) for each in kept]


def _on(kept: KeptUnit | KeptPlan, device: torch.device) -> KeptUnit | KeptPlan:
    """Move what a pass computed to the device where passes run."""
    if isinstance(kept, KeptPlan):
        return kept
    return replace(kept, known=tuple(_changed(each, lambda value_N: value_N.to(device)) for each in kept.known))


def _changed(known: PrecomputedValues, change: Any) -> PrecomputedValues:
    tensors = {each.name: getattr(known, each.name) for each in fields(known)}
    return PrecomputedValues(**{name: None if value is None else change(value) for name, value in tensors.items()})


def _one_row(kept: KeptUnit, row: tuple[str, int]) -> KeptUnit:
    """Cut a row with its completions out of the microbatches of a unit."""
    parts = {
        number: part
        for number, (batch, known) in enumerate(zip(kept.unit.batches, kept.known, strict=True))
        if (part := _part(batch, known, row)) is not None
    }
    prefixes = []
    for each in kept.unit.prefixes:
        first, stop = (sum(number < end for number in parts) for end in (each.first, each.stop))
        if first < stop:
            prefixes.append(replace(each, first=first, stop=stop))
    unit = MicrobatchUnit(batches=tuple(batch for batch, _ in parts.values()), prefixes=tuple(prefixes))
    return KeptUnit(unit=unit, known=tuple(known for _, known in parts.values()))


def _part(
    batch: PolicyBatch, known: PrecomputedValues, row: tuple[str, int]
) -> tuple[PolicyBatch, PrecomputedValues] | None:
    """Cut a row's completions out of a microbatch; None if it has none."""
    places = [place for place, name in enumerate(batch.names_C) if (name.row, name.index) == row]
    if not places:
        return None
    packed = batch.packed
    is_own_N = torch.isin(packed.continuation_of_N, torch.tensor(places))
    alone = replace(
        batch,
        packed=packed.only(places),
        rows=tuple(batch.rows[place] for place in places),
        advantages_C=batch.advantages_C[places],
        sampler_logprobs_N=batch.sampler_logprobs_N[is_own_N],
        old_logprobs_N=None if batch.old_logprobs_N is None else batch.old_logprobs_N[is_own_N],
        teacher=None if batch.teacher is None else batch.teacher[is_own_N],
        prompt_ids=(row[0],),
        names_C=tuple(batch.names_C[place] for place in places),
    )
    return alone, _changed(known, lambda value_N: value_N[is_own_N.to(value_N.device)])


def _written(kept: Sequence[KeptUnit | KeptPlan]) -> bytes:
    if not kept:
        return b""
    tensors: dict[str, Tensor] = {}
    tree = _tree(list(kept), "", tensors)
    return save(tensors, {HEADER: json.dumps(redact_values(tree))})


def _tree(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value in the form of JSON; its tensors are put into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if is_dataclass(value) and not isinstance(value, type):
        inner = {each.name: getattr(value, each.name) for each in fields(value)}
        return {"class": type(value).__name__, **_tree(inner, path, tensors)}
    if isinstance(value, Mapping):
        return {"fields": {name: _tree(each, _below(path, name), tensors) for name, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_tree(each, _below(path, number), tensors) for number, each in enumerate(value)]
    return value


def _below(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _value(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the value that `_tree` wrote."""
    if isinstance(tree, list):
        return tuple(_value(each, tensors) for each in tree)
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    inner = {name: _value(each, tensors) for name, each in tree["fields"].items()}
    return CLASSES[tree["class"]](**inner) if "class" in tree else inner
