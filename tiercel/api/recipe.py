"""A recipe from Python: the arguments of a function, put into the plain data that a file would contain."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from tiercel.api.given import are_paths, is_rows, write_functions, write_rows
from tiercel.config import BaseRecipe, Kind, recipe_to_yaml
from tiercel.config.keys import RECIPES, every_key
from tiercel.config.loading import Recipe as AnyRecipe
from tiercel.config.loading import read_tree, recipe_of_tree, superseded
from tiercel.config.yaml_text import render
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.runs.adapters import starting_adapter
from tiercel.writing import write_text

PathText = str | PathLike[str]
SHORT = {"steps": "train.steps", "lr": "optim.lr", "seed": "train.seed", "eval": "data.eval"}  # keys of sections
NAMED = {"model": "path", "data": "train"}  # the key that a plain value for a section sets
ROWS = ("train", "eval")  # keys of the section `data`
STAND_IN, ROWS_STAND_IN = "given:function_{}", "hf:given/rows"  # of forms that name no file


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as plain data: `Recipe.from_file("grpo.yaml")`, or `Recipe({"model": {"path": ...}, ...})`. It may
    contain rows and functions; the functions that train write them into the run directory."""

    tree: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: PathText) -> "Recipe":
        """Read a YAML file. Raises RecipeError if it cannot be read."""
        return cls(read_tree(path))

    def to_file(self, path: PathText) -> None:
        """Write the recipe as YAML, which the command line can read. Raises RecipeError if it contains rows or
        functions, which only a run's own config.yaml can name."""
        if holding := sorted(_held(self.tree)):
            raise RecipeError(
                [f"{holding[0]}: contains objects in memory; start a run, which writes them to its config.yaml"]
            )
        write_text(Path(path), render(_plain(dict(self.tree))))

    def changed(self, **keys: Any) -> "Recipe":
        """Return the recipe with these arguments, in the form that the functions that train accept. A mapping changes
        the keys that it names in an existing section, also in sections below it. None leaves a key as it is, and the
        log says so for a section that null would remove on the command line."""
        tree = dict(self.tree)
        for name, value in keys.items():
            if name == "rewards":
                value = reward_entries(value)
            if isinstance(value, Mapping) and value and all(hasattr(each, "features") for each in value.values()):
                raise RecipeError([f"{name}: has several splits ({', '.join(value)}); pass one of them"])
            section, _, leaf = SHORT.get(name, name).partition(".")
            before = tree.get(section)
            if value is None:
                if before and not leaf:
                    logger.warning(
                        f"{name} is None, which leaves the recipe's {name} as it is; to train without it, take it out "
                        "of the recipe"
                    )
                continue
            if leaf:
                value = {leaf: value}
            elif section in NAMED and not (isinstance(value, Mapping) and not _is_row(value)):
                value = {NAMED[section]: value}
            tree[section] = _changed(before, value, section)
        return Recipe(tree)

    def judged(self, kind: Kind) -> AnyRecipe:
        """Validate the whole recipe, then write what is in memory into the run directory that it names. Returns what
        the command line would have read. Raises RecipeError with every problem."""
        plain = {name: _plain(value) for name, value in self.tree.items()}
        recipe_of_tree(kind, _with_stand_ins(plain, []))
        output = Path(plain["output"])
        data = dict(plain["data"])
        for name in ROWS:
            if name in data and is_rows(data[name]):
                written = write_rows(data[name], output, data.get("image_root"))
                data |= {name: written.file, "image_roots": written.admitted(data.get("image_roots", ()))}
        return starting_adapter(recipe_of_tree(kind, write_functions({**plain, "data": data}, output)))


def _plain(value: Any) -> Any:
    """Return one of tiercel's own sections as a mapping, a path as text, and mappings with their values converted
    likewise."""
    if isinstance(value, PathLike):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if are_paths(value):
        return [str(path) for path in value]
    return value.tolist() if hasattr(value, "tolist") else value  # numbers of numpy


def reward_entries(rewards: Iterable[Any] | None) -> list[Any] | None:
    """Return the entries of a recipe's rewards. A name is a built-in, or your own as "file.py:function"; a function is
    your own; (reward, weight) gives it a weight."""
    if rewards is None:
        return None
    is_one = callable(rewards) or isinstance(rewards, str | Mapping)
    is_weighted = isinstance(rewards, tuple) and len(rewards) == 2 and hasattr(rewards[1], "__float__")
    given = [rewards] if is_one or is_weighted else rewards
    return [_entry(each) for each in given]


def _entry(reward: Any) -> dict[str, Any]:
    if isinstance(reward, tuple) and len(reward) == 2:
        return {**_entry(reward[0]), "weight": reward[1]}
    if isinstance(reward, Mapping):
        return dict(reward)
    if isinstance(reward, str):
        return {"call" if ":" in reward else "name": reward}
    return {"call": reward}


def _changed(before: Any, given: Any, path: str) -> Any:
    """Return the value of the section at `path` with the keys that are given. What is not a section is replaced."""
    if not isinstance(before, Mapping) or not isinstance(given, Mapping) or path not in _sections():
        return given
    lost = superseded(f"{path}.{leaf}" for leaf, value in given.items() if value is not None)
    kept = {leaf: value for leaf, value in before.items() if f"{path}.{leaf}" not in lost}
    return kept | {leaf: _changed(kept.get(leaf), value, f"{path}.{leaf}") for leaf, value in given.items()}


@cache
def _sections() -> frozenset[str]:
    return frozenset(key.path for key in every_key() if key.section is not None and not key.is_list_of_sections)


def _is_row(value: Mapping[str, Any]) -> bool:
    """Return whether a mapping that was passed as `data` is a row and not a section, because it has none of a section's
    keys."""
    return "train" not in value and "path" not in value and bool(value.keys() & {"messages", "prompt", "images"})


def _with_stand_ins(tree: Any, functions: list[Any]) -> Any:
    """Copy plain data with a text in place of what is in memory, so that the rest can be validated before anything is
    written. `functions` collects those that were found; each has a text of its own."""
    if isinstance(tree, Mapping):
        return {
            name: ROWS_STAND_IN if name in ROWS and is_rows(value) else _with_stand_ins(value, functions)
            for name, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [_with_stand_ins(value, functions) for value in tree]
    if callable(tree):
        if tree not in functions:
            functions.append(tree)
        return STAND_IN.format(functions.index(tree))
    return tree if tree is None or isinstance(tree, str | int | float) else [f"a {type(tree).__name__}"]


def _held(tree: Any, key: str = "") -> Iterable[str]:
    """Yield the keys whose values are in memory."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            inner = f"{key}.{name}" if key else name
            if name in ROWS and key == "data" and is_rows(value):
                yield inner
            else:
                yield from _held(value, inner)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _held(value, f"{key}.{number}")
    elif callable(tree):
        yield key


def text_of(recipe: BaseRecipe) -> str:
    """Return the recipe as the text of a file, with the line that names its command."""
    assert recipe.kind in RECIPES
    return f"# tiercel {recipe.kind}\n{recipe_to_yaml(recipe)}"  # type: ignore[arg-type]
