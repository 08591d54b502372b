"""`tiercel init`: ask five to seven questions, or read flags, and write a recipe that passes `tiercel check`."""

import math
import os
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tiercel.cli.values import MemorySize, size
from tiercel.config import Kind
from tiercel.config.loading import recipe_of_tree
from tiercel.config.row_sources import RowSource, row_source
from tiercel.config.yaml_text import render
from tiercel.data.formats.message_parts import with_visuals_of_parts
from tiercel.data.readers import records_of
from tiercel.data.turns import with_turns_of_text
from tiercel.errors import DataError, RecipeError
from tiercel.messages import translated
from tiercel.regular_files import open_new
from tiercel.tables import table_rows
from tiercel.writing import writing

METHODS: dict[str, Kind] = {"grpo": "grpo", "sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "reward"}
TASKS: dict[str, list[dict[str, Any]]] = {  # the rewards of GRPO
    "boxes": [{"name": "iou"}],
    "points": [{"name": "point_in_box"}],
    "count": [{"name": "count"}],
    "number": [{"name": "number"}],
    "choice": [{"name": "choice"}],
    "math": [{"name": "math"}],
    "text": [{"name": "normalised"}],
    "reasoning": [{"name": "normalised"}, {"name": "format", "weight": 0.2}],
}
OWN_SECTION: dict[Kind, dict[str, Any]] = {
    "dpo": {"dpo": {"loss": "sigmoid"}},
    "kto": {"kto": {}},
    "reward": {"ranking": {}},
}
SMALL_GPU, MIDDLE_GPU = 30e9, 60e9  # bytes
MEDIA = ("image", "images", "video", "videos", "file_name")  # columns with paths
NO_TERMINAL = "init cannot ask without a terminal"
FEW_ROWS = 100  # the rows that are looked at; for fewer, the size of a step is chosen by their number
USUAL_STEP, LEAST_STEPS = 16, 4  # rows of a step; steps of an epoch over few rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeQuestion:
    """A question of the command: its flag, its text, its default, the accepted answers."""

    flag: str
    text: str
    usual: str = ""
    choices: tuple[str, ...] = ()
    method: str = ""  # for which alone it is asked
    files: tuple[str, ...] = ()  # of which the answer, a directory, must contain one

    def is_asked(self, given: Mapping[str, str]) -> bool:
        """Return whether it is asked after these answers."""
        return self.method in ("", given.get("method")) and (self.flag != "images" or bool(self.files))

    def read(self, value: str) -> str:
        """Return the answer. Raises RecipeError if it is not one of the choices, not the size of a memory, or not a
        directory with one of the files."""
        if self.flag == "gpu":
            _memory(value)
        if self.files and not _contains_one(Path(value), self.files):
            raise RecipeError([f"--{self.flag}: {value} does not contain {self.files[0]}, which a row names"], "init")
        if not self.choices:
            return value
        if value.lower() not in self.choices:
            known = ", ".join(self.choices)
            raise RecipeError([f"--{self.flag}: {value} is not one of {known}"], source="init")
        return value.lower()


QUESTIONS = tuple(
    RecipeQuestion(flag=flag, text=text, usual=usual, choices=tuple(filter(None, choices.split(", "))), method=method)
    for flag, text, usual, choices, method in table_rows("tiercel.cli", "questions.txt")
)


def run(recipe: None, arguments: Namespace) -> None:
    """Ask for whatever no flag gives, and write the recipe. Raises RecipeError if the recipe would not pass its
    check."""
    file: Path = arguments.file
    if file.exists():  # before anyone has answered questions
        raise RecipeError([f"{file} already exists; remove it, or name another file with --file"], source="init")
    if not file.parent.is_dir():
        reason = f"{file.parent} is not a directory; create it, or name another file with --file"
        raise RecipeError([reason], source="init")
    given = answers(arguments, _ask if sys.stdin.isatty() else _usual)
    kind = METHODS[given["method"]]
    tree = recipe_tree(kind, given)
    recipe_of_tree(kind, tree, str(file))
    with writing(file), open_new(file) as stream:
        stream.write(f"# tiercel {kind}\n{render(tree)}")
    memory = _memory(given["gpu"])
    plan = f"tiercel plan {file} --gpu-memory {memory.text.replace(' ', '')}; " if memory else ""  # of GPUs alone
    print(f"{file}\nnext: tiercel check {file}; {plan}tiercel {kind} {file}")


def answers(arguments: Namespace, ask: Callable[[RecipeQuestion], str]) -> dict[str, str]:
    """Return the answer to each question under its flag. Raises RecipeError if an answer is missing or is not among the
    choices."""
    found: dict[str, str] = {}
    for each in QUESTIONS:
        question = _about_pictures(each, found["data"]) if each.flag == "images" else each
        value = getattr(arguments, question.flag)
        if not value and question.is_asked(found) and not (value := ask(question)):
            why = f"{question.files[0]} was not found beside the rows" if question.files else NO_TERMINAL
            raise RecipeError([f"--{question.flag}: is required, because {why}"], "init")
        if value:
            found[question.flag] = question.read(value)
    return found


def _about_pictures(question: RecipeQuestion, data: str) -> RecipeQuestion:
    """Return the question about the directory of the pictures. If no picture of the first rows was found beside the
    rows, it lists them and offers a directory that has one of them."""
    own = Path(data) if Path(data).is_dir() else Path(data).parent
    files = tuple(file for files in _first_rows(data) for file in files)
    if not files or _contains_one(own, files):
        return question
    places = (Path(), own / "images", own.parent, Path(files[0]).parent)
    return replace(question, files=files, usual=next((str(each) for each in places if _contains_one(each, files)), ""))


@cache
def _first_rows(data: str) -> tuple[tuple[str, ...], ...]:
    """Return the paths in each of the first rows of a file, a directory or a pattern, or nothing if these cannot be
    read, which `check` explains."""
    try:
        source = row_source(data)
        if source.is_hub or source.is_remote:
            return ()
        records = chain.from_iterable(records_of(RowSource(path=file)) for file in source.files)
        first = islice(records, min(FEW_ROWS, source.count or FEW_ROWS))
        return tuple(tuple(_files_of(record.value)) for record in first if record.problem is None)
    except (ValueError, LookupError, OSError):
        return ()


def _files_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of a row's pictures and videos, not those that are embedded or are URLs."""
    with suppress(DataError):  # which `check` explains
        row = with_visuals_of_parts(with_turns_of_text(row))
    for column in MEDIA:
        for value in each if isinstance(each := row.get(column), list) else [each]:
            path = value.get("path") if isinstance(value, Mapping) and not value.get("bytes") else value
            if isinstance(path, str) and "." in path[-6:] and "://" not in path:
                yield path


def _contains_one(folder: Path, files: Sequence[str]) -> bool:
    real = Path(os.path.realpath(folder))
    return any(os.path.isfile(real / file) and (real / file).is_relative_to(real) for file in files)


def step_size(rows: int) -> tuple[dict[str, Any] | None, int]:
    """Return what data.eval holds out, and the rows of a step. Of few rows, about a tenth is held out so that the steps
    divide the others; `rows` is 0 if their number is unknown."""
    if not 0 < rows < FEW_ROWS:
        return {"fraction": 0.05}, USUAL_STEP
    most = max(2, rows // 10)
    found = [
        (size, -held)
        for held in range(math.ceil(rows / 20), min(most, rows - 1) + 1)
        for size in range(1, max(1, min(USUAL_STEP, (rows - held) // LEAST_STEPS)) + 1)
        if (rows - held) % size == 0
    ]
    size, held = max(found, default=(1, 0))
    return {"count": -held} if held else None, size


def recipe_tree(kind: Kind, given: Mapping[str, str]) -> dict[str, Any]:
    """Build the recipe. On a small GPU, weights are quantised and activations recomputed; `tiercel plan --fit` can
    refine it."""
    memory = _memory(given["gpu"])
    model: dict[str, Any] = {"path": given["model"], "dtype": "float32" if memory is None else "bfloat16"}
    learner: dict[str, Any] = {"max_tokens_per_microbatch": "auto"} if memory else {}
    if memory is not None and memory.byte_count < MIDDLE_GPU:
        learner["gradient_checkpointing"] = "full" if memory.byte_count < SMALL_GPU else "selective"
    if memory is not None and memory.byte_count < SMALL_GPU:
        model["quantize"] = "nf4"
    held_out, prompts = step_size(len(_first_rows(given["data"])))
    return {
        "model": model,
        "lora": {"rank": 32, "alpha": 64, "targets": "language"},
        "data": {
            "train": given["data"],
            **({"image_root": given["images"]} if "images" in given else {}),
            **({"eval": held_out} if held_out else {}),
        },
        **({"rewards": TASKS[given["task"]], "rollout": {"group_size": 8}} if kind == "grpo" else {}),
        **OWN_SECTION.get(kind, {}),
        **({"learner": learner} if learner else {}),
        "optim": {
            "lr": 1e-5 if kind in ("grpo", "dpo", "kto") else 1e-4,
            "schedule": "cosine",
            "prompts_per_step": prompts,
        },
        "train": {"epochs": 1, "save_every": 50, **({"eval_every": 50} if held_out else {})},
        "output": given["output"],
    }


def _memory(text: str) -> MemorySize | None:
    if text.lower() in ("none", "cpu"):
        return None
    try:
        return size(text)
    except ArgumentTypeError as error:
        raise RecipeError([f"--gpu: {error}"], source="init") from error


def _ask(question: RecipeQuestion) -> str:
    """Ask on standard error, so that standard output has only the result, until the answer can be read."""
    hint = ", ".join(question.files[:1] or question.choices)
    choices = f" ({hint})" if hint else ""
    usual = f" [{question.usual}]" if question.usual else ""
    while True:
        print(f"{translated(question.text)}{choices}{usual}: ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return question.usual
        value = line.strip() or question.usual
        try:
            question.read(value)
        except RecipeError as error:
            print(error, file=sys.stderr)
            continue
        if value:
            return value


def _usual(question: RecipeQuestion) -> str:
    return question.usual
