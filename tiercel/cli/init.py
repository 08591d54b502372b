"""`tiercel init`: ask six questions and write a recipe that passes `tiercel check`. Flags can answer them too."""

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.cli.values import MemorySize, size
from tiercel.config import Kind
from tiercel.config.loading import recipe_of_tree
from tiercel.config.yaml_text import render
from tiercel.errors import RecipeError
from tiercel.messages import translated
from tiercel.regular_files import open_new
from tiercel.tables import table_rows

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeQuestion:
    """A question of the command: its flag, its text, its default, the accepted answers."""

    flag: str
    text: str
    usual: str = ""
    choices: tuple[str, ...] = ()
    method: str = ""  # for which alone it is asked

    def is_asked(self, given: Mapping[str, str]) -> bool:
        """Return whether it is asked after these answers."""
        return self.method in ("", given.get("method"))

    def read(self, value: str) -> str:
        """Return the answer. Raises RecipeError if it is not one of the choices, or not the size of a memory."""
        if self.flag == "gpu":
            _memory(value)
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
    given = answers(arguments, _ask if sys.stdin.isatty() else _usual)
    kind = METHODS[given["method"]]
    tree = recipe_tree(kind, given)
    recipe_of_tree(kind, tree, str(file))
    with open_new(file) as stream:
        stream.write(f"# tiercel {kind}\n{render(tree)}")
    memory = _memory(given["gpu"])
    plan = f"tiercel plan {file} --gpu-memory {memory.text.replace(' ', '')}; " if memory else ""  # of GPUs alone
    print(f"{file}\nnext: tiercel check {file}; {plan}tiercel {kind} {file}")


def answers(arguments: Namespace, ask: Callable[[RecipeQuestion], str]) -> dict[str, str]:
    """Return the answer to each question under its flag. Raises RecipeError if an answer is missing or is not among the
    choices."""
    found: dict[str, str] = {}
    for question in QUESTIONS:
        if not question.is_asked(found):
            continue
        value = getattr(arguments, question.flag) or ask(question)
        if not value:
            raise RecipeError(
                [f"--{question.flag}: is required, because there is no terminal to ask at"], source="init"
            )
        found[question.flag] = question.read(value)
    return found


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
    sections: dict[str, Any] = {
        "model": model,
        "lora": {"rank": 32, "alpha": 64, "targets": "language"},
        "data": {"train": given["data"], "eval": {"fraction": 0.05}},
        **({"rewards": TASKS[given["task"]], "rollout": {"group_size": 8}} if kind == "grpo" else {}),
        **OWN_SECTION.get(kind, {}),
        **({"learner": learner} if learner else {}),
        "optim": {"lr": 1e-5 if kind in ("grpo", "dpo", "kto") else 1e-4, "schedule": "cosine", "warmup_steps": 5},
        "train": {"epochs": 1, "save_every": 50, "eval_every": 50},
        "output": given["output"],
    }
    return sections


def _memory(text: str) -> MemorySize | None:
    if text.lower() in ("none", "cpu"):
        return None
    try:
        return size(text)
    except ArgumentTypeError as error:
        raise RecipeError([f"--gpu: {error}"], source="init") from error


def _ask(question: RecipeQuestion) -> str:
    """Ask on standard error, so that standard output has only the result, until the answer can be read."""
    choices = f" ({', '.join(question.choices)})" if question.choices else ""
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
