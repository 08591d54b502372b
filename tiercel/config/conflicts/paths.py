"""Check the files and directories that a recipe names."""

from collections.abc import Callable, Iterator, Mapping
from os import getcwd, listdir
from os.path import dirname, exists, expanduser, isdir, isfile, join, realpath
from typing import Any

from tiercel.config.conflicts.table import conflict
from tiercel.config.keys import ENTRY
from tiercel.config.row_sources import row_source
from tiercel.config_base import Keys, Problem, shown
from tiercel.message_text import LONGEST_PATH
from tiercel.user_functions import call_file

BESIDE = (f"rewards.{ENTRY}.model", "teacher", "algorithm.teacher")  # models other than the trained one
CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".json")


def path_problems(tree: Mapping[str, Any]) -> list[Problem]:
    """List the files and directories that a recipe names and that do not exist, relative to the working directory.

    Takes the recipe as it was read, so that its problems can be reported together with those of the schema; a value
    that is not text is skipped.
    """
    problems = [
        Keys(key).problem(f"is {shown(given, LONGEST_PATH)}, but {fault}")
        for declared, check in PATH_CHECKS.items()
        for key, given in _texts(tree, declared)
        if (fault := check(given)) is not None
    ]
    for section in ("model", *BESIDE):
        paths = {key.removesuffix(".path"): path for key, path in _texts(tree, f"{section}.path")}
        for key, revision in _texts(tree, f"{section}.revision"):
            path = paths.get(key.removesuffix(".revision"))
            if path is not None and isdir(expanduser(path)):
                problems.append(conflict("revision of a directory", key, shown(revision), path))
    return problems


def _texts(tree: Any, declared: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Find the texts at a declared key (`rewards.N.call`) of a raw recipe, each with its dotted name."""
    name, _, rest = declared.partition(".")
    branches: list[tuple[str | int, Any]]
    if name == ENTRY:
        branches = list(enumerate(tree)) if isinstance(tree, list) else []
    else:
        branches = [(name, tree[name])] if isinstance(tree, dict) and name in tree else []
    for branch, value in branches:
        if rest:
            yield from _texts(value, rest, f"{prefix}{branch}.")
        elif isinstance(value, str):
            yield f"{prefix}{branch}", value


def _model_fault(given: str) -> str | None:
    directory = expanduser(given)
    looks_local = (
        given.startswith(("/", "./", "../", "~"))
        or given.count("/") != 1
        or given.endswith(CHECKPOINT_SUFFIXES)
        or exists(directory)
    )
    if not looks_local:
        return None
    if isfile(directory):
        return f"this is a file; use its directory, {dirname(directory) or '.'}"
    if not isdir(directory):
        return f"{_no_such('directory', directory)}; to use a model from the hub, write organisation/name"
    if not isfile(join(directory, "config.json")):
        return "this directory has no config.json; use the directory of a Hugging Face checkpoint"
    return None


def _start_fault(given: str) -> str | None:
    return None if isfile(join(given, "config.yaml")) else _adapter_fault(given)  # a run, whose adapter is found later


def _adapter_fault(given: str) -> str | None:
    fault = _directory_fault(given)
    if fault is None and not isfile(join(given, "adapter_config.json")):
        return (
            "this directory has no adapter_config.json; use the directory of an adapter, such as "
            "RUN/checkpoints/step-000500/adapter"
        )
    return fault


def _file_fault(given: str) -> str | None:
    if isdir(given):
        return "this is a directory; use a file"
    return None if isfile(given) else _no_such("file", given)


def _directory_fault(given: str) -> str | None:
    if isfile(given):
        return "this is a file; use a directory"
    return None if isdir(given) else _no_such("directory", given)


def _image_root_fault(given: str) -> str | None:
    fault = _directory_fault(given)
    if fault is None and dirname(realpath(given)) == realpath(given):
        return "this is the whole file system, so any file could be named as an image; use the directory of the images"
    return fault


def _rows_fault(given: str) -> str | None:
    try:
        source = row_source(given)
    except ValueError as error:
        return str(error)
    if source.is_hub:
        return _directory_fault(source.path) if source.path.startswith(("/", ".", "~")) else None
    if source.is_remote:
        return None
    if not source.files:
        return "no file matches this pattern"
    faults = (_rows_file_fault(path) for path in source.files)
    return next((fault for fault in faults if fault is not None), None)


def _rows_file_fault(path: str) -> str | None:
    if not isdir(path):
        return _file_fault(path)
    names = [*listdir(path), *(listdir(join(path, "data")) if isdir(join(path, "data")) else [])]
    if {"state.json", "dataset_dict.json"} & set(names) or any(name.endswith(".parquet") for name in names):
        return None
    return "this directory has no data set: neither the state.json that save_to_disk writes, nor .parquet files"


def _call_fault(given: str) -> str | None:
    file = call_file(given)
    return _file_fault(file) if file is not None else None


def _output_fault(given: str) -> str | None:
    if not given.strip():
        return "must name a directory, such as runs/first"
    if given.startswith("~") or "$" in given:
        return _no_such("directory", given)
    return "this is a file; use a directory, which is created if it does not exist" if isfile(given) else None


def _no_such(what: str, given: str = "") -> str:
    if given.startswith("~"):
        return f"~ is not expanded here; use {expanduser(given)}"
    if "$" in given:
        return "variables are not expanded here; write the path in full"
    return f"there is no such {what} (relative paths start at {getcwd()})"


PATH_CHECKS: dict[str, Callable[[str], str | None]] = {
    "model.path": _model_fault,
    "lora.init": _start_fault,
    "data.train": _rows_fault,
    f"data.train.{ENTRY}": _rows_fault,
    f"data.mix.{ENTRY}.path": _rows_fault,
    f"data.mix.{ENTRY}.path.{ENTRY}": _rows_fault,
    f"data.mix.{ENTRY}.image_root": _image_root_fault,
    "data.eval": _rows_fault,
    f"data.eval.{ENTRY}": _rows_fault,
    "data.image_root": _image_root_fault,
    f"data.image_roots.{ENTRY}": _image_root_fault,
    "data.template": _file_fault,
    "train.deepspeed.config": _file_fault,
    f"rewards.{ENTRY}.call": _call_fault,
    "algorithm.loss.call": _call_fault,
    "algorithm.advantage.call": _call_fault,
    f"rewards.{ENTRY}.json_schema": _file_fault,
    f"rewards.{ENTRY}.judge.prompt": _file_fault,
    **{
        f"{section}.{key}": check
        for section in BESIDE
        for key, check in (("path", _model_fault), ("adapter", _adapter_fault), ("template", _file_fault))
    },
    "output": _output_fault,
}
