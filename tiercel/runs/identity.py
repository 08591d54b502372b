"""Whether a recipe continues a run: its keys, and the files that it names."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from os.path import dirname, expanduser, isdir, realpath
from pathlib import Path
from typing import Any

from tiercel.config import Recipe, flatten
from tiercel.config.conflicts.paths import PATH_CHECKS
from tiercel.config.keys import declared_name
from tiercel.config.row_sources import names_in, row_source
from tiercel.config.schema import Learner, Reliability
from tiercel.distributed.versions import fingerprint, installed_versions
from tiercel.regular_files import read_json
from tiercel.reliability.redaction import redact_values
from tiercel.runs.call_files import files_of_call
from tiercel.tables import table_rows


def _free_keys(effect: str) -> Iterator[str]:
    """Yield the keys whose change has an effect on what is computed: nothing, or rounding."""
    for section, its_effect, keys in table_rows("tiercel.runs", "free_keys.txt"):
        if its_effect == effect:
            yield from (f"{section}.{key}" for key in keys.split())


# The result is the same except that sums are computed in another order.
ROUNDED = (*_free_keys("rounding"), *(f"learner.{key}" for key in Learner.model_fields))
_WITHOUT_EFFECT = (*_free_keys("nothing"), *(f"reliability.{key}" for key in Reliability.model_fields))
MAY_DIFFER = (*_WITHOUT_EFFECT, *ROUNDED, "trackers", "output")


def changes(before: Recipe, now: Recipe) -> dict[str, str]:
    """Return the keys whose values differ, each with a line that shows both values. Two spellings of one path count as
    equal."""
    old, new = redact_values(flatten(before)), redact_values(flatten(now))  # config.yaml was written without secrets
    return {
        key: f"{key}: was {old.get(key)!r}, is {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_one_place(key, old, new)
    }


def may_differ(key: str) -> bool:
    """Return whether a run may continue with another value of this key."""
    return declared_name(key) in MAY_DIFFER


def is_pinned(key: str, before: Recipe) -> bool:
    """Return whether a key pins the revision of a model that had none. The checkpoint can tell whether it is the same
    one."""
    return key.endswith(".revision") and flatten(before).get(key) is None


def is_rounded(key: str) -> bool:
    """Return whether another value of this key only changes the order in which sums are computed."""
    return declared_name(key) in ROUNDED


def _is_one_place(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if declared_name(key) not in PATH_CHECKS:
        return False
    places = [_place(key, each) for each in (old, new)]
    return None not in places and places[0] == places[1]


def _place(key: str, values: Mapping[str, Any]) -> list[str] | None:
    """Return the real paths that a key names. Without `image_root`, images are next to their rows."""
    given = values.get(key)
    if given is None and key == "data.image_root":
        beside = (rows if isdir(rows) else dirname(rows) for rows in names_in(values["data.train"]))
        given = list(dict.fromkeys(beside))
    return None if given is None else [realpath(each) for each in names_in(given)]


_CALLS = frozenset({"rollout.environment", "rollout.tools", *(key for key in PATH_CHECKS if key.endswith(".call"))})
_NOT_READ = frozenset({"output", "train.deepspeed.config", *(key for key in PATH_CHECKS if "image_root" in key)})
_ROWS = frozenset({"data.train", "data.eval", "data.mix.N.path"})
_SUFFIXES = (".safetensors", ".json", ".jsonl", ".jinja", ".model", ".txt", ".parquet", ".arrow", ".tar")
_WHOLE = 16 * 1024 * 1024  # bytes; a file up to this size is read whole
_PIECES, _PIECE = 64, 64 * 1024  # of a larger file, spread over it, so that weights of many GB need not be read twice


def digests(recipe: Recipe) -> dict[str, str]:
    """Return a digest of the files that each key names on this machine. Keys that name none here are left out."""
    found = {key: digest_of(*_places(key, value)) for key, value in flatten(recipe).items()}
    return {key: digest for key, digest in found.items() if digest is not None}


def identity(recipe: Recipe) -> str:
    """Return a digest of everything that defines a run: the values that must not change, and the files that they
    name."""
    files = digests(recipe)
    values = {key: value for key, value in flatten(recipe).items() if not may_differ(key) and key not in files}
    return hashlib.sha256(json.dumps([values, files], sort_keys=True, default=str).encode()).hexdigest()[:16]


def changed_files(run: Path, recipe: Recipe) -> list[str]:
    """Return a line for each key whose files have changed since the last start of the run, and for each package whose
    version has changed."""
    file = run / "env.json"
    try:
        described = read_json(file) if os.path.lexists(file) else {}
        before, had = (described.get(name, {}) for name in ("files", "packages"))
    except (OSError, AttributeError):
        before = had = None
    if not isinstance(before, dict) or not isinstance(had, dict):
        return [
            f"{file} is not as the run wrote it; whether the files of the recipe have changed since then is unknown"
        ]
    now, names, has = digests(recipe), flatten(recipe), installed_versions()
    other = [name for name in had if had[name] != has.get(name)]
    return [
        *(f"{name}: version {has.get(name)} now, {had[name]} at the last start; numbers may differ" for name in other),
        *(
            f"{key}: the content of {names[key]} has changed since the last start; from here on, the run uses the "
            "new one"
            for key in sorted(before.keys() & now.keys())
            if before[key] != now[key]
        ),
    ]


def _places(key: str, value: object) -> Iterator[str]:
    declared = declared_name(key)
    several = tuple(value.values()) if isinstance(value, Mapping) else value
    for each in several if isinstance(several, tuple) else (several,):
        if not isinstance(each, str) or declared in _NOT_READ:
            continue
        if declared in _CALLS:
            yield from map(str, files_of_call(each))
        elif declared in _ROWS:
            yield from row_source(each).files
        elif declared in PATH_CHECKS:
            yield expanduser(each)


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place] if place.is_file() else []
    inside = [path for folder in (place, place / "data") if folder.is_dir() for path in folder.iterdir()]
    return sorted(path for path in inside if path.suffix in _SUFFIXES and path.is_file())


def digest_of(*places: str) -> str | None:
    """Return a digest of the names and contents of files and of the files in directories. For a large file, its size
    and parts of it are used. Returns None if there are no files or one cannot be read; whoever needs it reports
    that."""
    files = [path for place in places for path in _files(Path(place))]
    try:
        return fingerprint(files, pieces=_PIECES, piece=_PIECE, whole=_WHOLE) if files else None
    except OSError:
        return None
