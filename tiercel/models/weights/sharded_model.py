"""Writing of a whole model part by part, so that no process has to hold all of its weights."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.value_head import NAME
from tiercel.models.policy import WHOLE_FILE
from tiercel.models.weights.checkpoint_files import INDEX
from tiercel.models.weights.memory_errors import tensor_bytes
from tiercel.models.weights.saving import write_companions

SCRATCH = "part"  # the folder in which a part is written before its file is moved into place


class ModelParts:
    """A writer of a Hugging Face directory like the one of `save_model`, which gets the weights in parts.

    Each part must consist of whole layers (`parts_of`), because a published checkpoint may store several tensors of a
    layer as one.
    """

    def __init__(self, family: Family, model: HuggingFaceModel, directory: Path):
        self._family = family
        self._model = model
        self._directory = directory
        self._written: list[tuple[Path, dict[str, int]]] = []  # each file, and the bytes of its tensors
        directory.mkdir(parents=True)

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Write whole tensors, by their names in the model."""
        head = {name: each.float().cpu() for name, each in weights.items() if name.startswith(f"{NAME}.")}
        others = {name: each for name, each in weights.items() if name not in head}
        if head:
            save_file(head, self._directory / WHOLE_FILE)
        if not others:
            return
        scratch = self._directory / SCRATCH
        with _without_bars():
            self._family.save(self._model, scratch, others)
        for path in sorted(scratch.iterdir()):
            if path.suffix == ".safetensors":
                place = self._directory / f"{len(self._written):05d}.safetensors"
                self._written.append((path.rename(place), dict(tensor_bytes(place))))
            elif path.name != INDEX:  # the configs, which every part has
                path.replace(self._directory / path.name)
        shutil.rmtree(scratch)

    def finish(self) -> None:
        """Name the files like published ones, with an index if there are several, and add the tokenizer."""
        count = len(self._written)
        files: dict[str, str] = {}
        for number, (path, sizes) in enumerate(self._written, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._directory / name)
            files |= dict.fromkeys(sizes, name)
        if count > 1:
            total = sum(size for _, sizes in self._written for size in sizes.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_companions(self._family, self._directory)


def parts_of(sizes: Mapping[str, int], most_bytes: int) -> Iterator[list[str]]:
    """Divide a model's tensors, given with their bytes, into parts of whole layers with at most `most_bytes` bytes; a
    single layer may have more."""
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(_layer_of(name), []).append(name)
    part: list[str] = []
    held = 0
    for names in layers.values():
        size = sum(sizes[name] for name in names)
        if part and held + size > most_bytes:
            yield part
            part, held = [], 0
        part += names
        held += size
    if part:
        yield part


def _layer_of(name: str) -> str:
    """Return the beginning of a tensor's name that its layer's tensors share: up to the layer's number, or, outside
    layers, up to the module around the tensor's own."""
    pieces = name.split(".")
    number = next((place for place, piece in enumerate(pieces) if piece.isdecimal()), None)
    return ".".join(pieces[:-2] if number is None else pieces[: number + 1])


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from showing a progress bar for each part."""
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()
