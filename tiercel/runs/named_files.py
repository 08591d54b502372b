"""Whether the files that a recipe names are those that a run began with: its rows, model, template and functions."""

import hashlib
import json
import os
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path

from tiercel.calls import call_file
from tiercel.config import Recipe, flatten
from tiercel.config.keys import declared_name
from tiercel.config.path_rules import PATH_CHECKS
from tiercel.config.row_sources import row_source
from tiercel.regular_files import read_json
from tiercel.runs.sameness import may_differ

_CALLS = frozenset({"rollout.environment", "rollout.tools", *(key for key in PATH_CHECKS if key.endswith(".call"))})
_NOT_READ = frozenset({"output", "train.deepspeed.config", *(key for key in PATH_CHECKS if "image_root" in key)})
_ROWS = frozenset({"data.train", "data.eval", "data.mix.N.path"})
_SUFFIXES = (".safetensors", ".json", ".jsonl", ".jinja", ".model", ".txt", ".parquet", ".arrow")
_WHOLE = 16 * 1024 * 1024  # bytes of a file that is read whole
_PIECES, _PIECE = 64, 64 * 1024  # of a larger one, spread over it: weights of many GB need not be read twice


def digests(recipe: Recipe) -> dict[str, str]:
    """Return a digest of what each key names on this machine; keys that name nothing here are left out."""
    found = {key: _digest([path for place in _places(key, value) for path in _files(Path(place))])
             for key, value in flatten(recipe).items()}  # fmt: skip
    return {key: digest for key, digest in found.items() if digest is not None}


def identity(recipe: Recipe) -> str:
    """Return a digest of all that makes a run what it is: the values that must stay, and the files that they name."""
    files = digests(recipe)
    values = {key: value for key, value in flatten(recipe).items() if not may_differ(key) and key not in files}
    return hashlib.sha256(json.dumps([values, files], sort_keys=True, default=str).encode()).hexdigest()[:16]


def changed_files(run: Path, recipe: Recipe) -> list[str]:
    """Return a line on each key whose files have another content than at the last start of the run."""
    file = run / "env.json"
    try:
        described = read_json(file) if os.path.lexists(file) else {}
        before = described.get("files", {}) if isinstance(described, dict) else None
    except OSError:
        before = None
    if not isinstance(before, dict):
        return [f"{file} is not as the run wrote it; whether the files of the recipe have changed since is not known"]
    now, names = digests(recipe), flatten(recipe)
    return [
        f"{key}: {names[key]} has another content than at the last start; from here on the run has the new one"
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    ]


def _places(key: str, value: object) -> Iterator[str]:
    declared = declared_name(key)
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, str) or declared in _NOT_READ:
            continue
        if declared in _CALLS:
            yield from filter(None, [call_file(each)])
        elif declared in _ROWS:
            yield row_source(each).path
        elif declared in PATH_CHECKS:
            yield expanduser(each)


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place] if place.is_file() else []
    inside = [path for folder in (place, place / "data") if folder.is_dir() for path in folder.iterdir()]
    return sorted(path for path in inside if path.suffix in _SUFFIXES and path.is_file())


def _digest(files: list[Path]) -> str | None:
    """Digest the files' names and contents, of a large file its size and parts of it; None for what cannot be read,
    which is told where it is needed."""
    whole = hashlib.sha256()
    try:
        for path in files:
            size = path.stat().st_size
            whole.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                if size <= _WHOLE:
                    whole.update(file.read())
                    continue
                for number in range(_PIECES):
                    file.seek((size - _PIECE) * number // (_PIECES - 1))
                    whole.update(file.read(_PIECE))
    except OSError:
        return None
    return whole.hexdigest()[:16] if files else None
