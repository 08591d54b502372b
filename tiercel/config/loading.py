"""Load a recipe: read the file, apply the overrides, and check it by the schema and the rules. All problems are
reported at once."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from tiercel.config.conflicts.paths import path_problems
from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.conflicts.table import conflict
from tiercel.config.deepspeed import deepspeed_problems
from tiercel.config.keys import OWN_SECTIONS, RECIPES, declared_name, keys_of, named, sections_never_null
from tiercel.config.problems import dotted, location_of, schema_problems
from tiercel.config.schema import Kind, Recipe
from tiercel.config.yaml_text import MOST_BYTES, YamlProblem, parse, render
from tiercel.config_base import Problem, RuleError, shown
from tiercel.errors import ANY_RECIPE, RecipeError
from tiercel.rewards.registry import without_nulls

RecipePath: TypeAlias = "str | PathLike[str]"
Leaf: TypeAlias = "bool | int | float | str | tuple[Leaf, ...] | None"

_ROWS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".tar")  # endings of files that are no recipes
_DEEPEST = 20  # the most names in a key
ALTERNATIVES = (frozenset(("train.steps", "train.epochs")), frozenset(("data.eval.fraction", "data.eval.count")))
_CHANGED_BY_YAML = re.compile(r"\A(?:#|[\"'].*\n|[^\"'|>#].*(?:\s#|\n))", re.DOTALL)
_OVERRIDE = re.compile(r"(?P<key>[\w-]+(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)

# Replaces a required value that is missing or wrong, so that the rules can check the rest; never reaches a run.
_STAND_INS: dict[str, Any] = {
    "model": {"path": "stand-in"},
    "model.path": "stand-in",
    "data": {"train": "stand-in"},
    "data.train": "stand-in",
    "train": {},
    "output": "stand-in",
    "rewards": [{"name": "exact"}],
}


def load_recipe(kind: Kind, path: RecipePath, overrides: Sequence[str] = (), *, check_paths: bool = True) -> Recipe:
    """Read the recipe of a YAML file, apply the `a.b=c` overrides, and check the whole.

    Overrides are applied in order, so the last one for a key counts. Their values are YAML, and null removes a section
    that cannot be null. With `check_paths`, the files and directories that the recipe names must exist, relative to the
    working directory.

    Raises:
        RecipeError: with one line for each problem of the file, overrides, schema, rules and paths.
    """
    tree, lines = _read(path, overrides)
    return recipe_of_tree(kind, tree, str(path), lines, check_paths=check_paths)


def recipe_of_tree(
    kind: Kind, tree: dict[str, Any], source: str = ANY_RECIPE, lines: Sequence[str] = (), *, check_paths: bool = True
) -> Recipe:
    """Make a recipe of plain data and check all of it, as `load_recipe` does. `lines` are problems that are already
    known. Raises RecipeError."""
    recipe, problems = _judged(tree, kind, check_paths=check_paths)
    if check_paths and recipe is not None and not problems:
        problems = deepspeed_problems(recipe)
    lines = [*lines, *(problem.line for problem in problems)]
    if lines or recipe is None:
        raise RecipeError(list(dict.fromkeys(lines)), source)
    return recipe


def problems_of_text(text: str, kind: Kind) -> list[str]:
    """Return a line for each problem in a recipe's text, its paths included."""
    tree, lines = parse(text)
    return lines + [problem.line for problem in _judged(tree, kind, check_paths=True)[1]]


def problems_of_tree(tree: dict[str, Any], kind: Kind) -> list[Problem]:
    """List what the schema and the rules refuse in a recipe that is plain data."""
    return _judged(tree, kind, check_paths=False)[1]


def _judged(tree: dict[str, Any], kind: Kind, *, check_paths: bool) -> tuple[Recipe | None, list[Problem]]:
    """Check a recipe by the schema, the rules and, if asked for, its paths. The sections that belong to other kinds of
    recipes are left out, with a problem for each."""
    known = RECIPES[kind].model_fields
    foreign = {section: other for other, own in OWN_SECTIONS.items() for section in own if section not in known}
    problems = [
        conflict("section of another kind", section, named(kind), other)
        for section, other in foreign.items()
        if section in tree
    ]
    tree = {name: value for name, value in tree.items() if name not in foreign}
    recipe, found = _judge(tree, kind)
    problems += found
    if check_paths:
        told = {problem.key for problem in problems}
        problems += [problem for problem in path_problems(tree) if problem.key not in told]
    return recipe, problems


def detect_kind(path: RecipePath, overrides: Sequence[str] = ()) -> Kind:
    """Return the kind whose own section the recipe has, or "sft" if it has none.

    Raises:
        RecipeError: if the file cannot be read, or an override is malformed.
    """
    tree = read_tree(path, overrides)
    return next((kind for kind, own in OWN_SECTIONS.items() if any(section in tree for section in own)), "sft")


def read_tree(path: RecipePath, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe as plain data, without checking it. Raises RecipeError if the file cannot be read, or if an
    override is malformed."""
    tree, lines = _read(path, overrides)
    if lines:
        raise RecipeError(lines, str(path))
    return tree


def recipe_to_yaml(recipe: Recipe) -> str:
    """Return the whole recipe as YAML, defaults included, in the order of the schema; `load_recipe` reads an equal
    recipe from it."""
    return render(recipe.model_dump(mode="json"))


def flatten(recipe: Recipe) -> dict[str, Leaf]:
    """Map the dotted key of each leaf to its value, for comparing two recipes.

    Entries of `rewards` are numbered (`rewards.0.name`), lists of plain values are one leaf, and a section that is null
    is a leaf itself (`lora`).
    """
    return dict(recipe.leaves())


def _read(path: RecipePath, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read the recipe as plain data; also return a line for each key that is given twice and for each malformed
    override."""
    source = str(path)
    if source.lower().endswith(_ROWS) and Path(path).exists():
        reason = "is a file of rows, not a recipe; a recipe names it as data.train, and `tiercel init` writes one"
        raise RecipeError([reason], source)
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_BYTES + 1).decode("utf-8-sig")  # enough for `parse` to refuse a longer file
    except FileNotFoundError as error:
        raise RecipeError([f"there is no such file (relative paths start at {Path.cwd()})"], source) from error
    except IsADirectoryError as error:
        raise RecipeError(["this is a directory; name the YAML file itself"], source) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError([f"line {line} is not UTF-8 text; save the file as UTF-8"], source) from error
    except (OSError, ValueError) as error:
        raise RecipeError([f"cannot be read: {error}"], source) from error
    try:
        tree, lines = parse(text)
    except YamlProblem as error:
        raise RecipeError([str(error)], source) from error
    if tree is None:
        raise RecipeError(["the file is empty, but a recipe needs at least model, data, train and output"], source)
    if not isinstance(tree, dict):
        raise RecipeError([f"the top level is {shown(tree)}, but must consist of sections, such as `model:`"], source)
    changed = (each.partition("=") for each in overrides)
    for key in superseded(key for key, _, value in changed if value.strip() not in ("null", "~")):
        tree = _without(tree, key.split("."))
    for override in overrides:
        try:
            tree = _override(tree, override)
        except _OverrideProblem as error:
            lines.append(f"override {shown(override)}: {error}")
    return tree, lines


def superseded(changed: Iterable[str]) -> list[str]:
    """Return the keys that a recipe loses because, of two that exclude each other, the other one is changed."""
    names = set(changed)
    return [other for pair in ALTERNATIVES if len(names & pair) == 1 for other in pair - names]


class _OverrideProblem(ValueError):
    """An override cannot be applied; the message has the reason and what to write instead."""


def _override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """Copy `tree` with one override `a.b=c` applied."""
    if override.startswith("-"):
        raise _OverrideProblem("begins with a dash; use key=value without dashes, such as optim.lr=1e-5")
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise _OverrideProblem("must have the form key=value, without spaces around =, such as optim.lr=1e-5")
    if not match["value"].strip():
        raise _OverrideProblem(f"has no value; use {match['key']}=null, or {match['key']}='\"\"' for empty text")
    try:
        value, twice = parse(match["value"])
    except YamlProblem as error:
        raise _OverrideProblem(f"the value is not valid YAML ({error}); put text in quotes") from error
    if twice:
        raise _OverrideProblem("; ".join(twice))
    text = match["value"].strip()
    if (isinstance(value, str) or text.startswith("#")) and _CHANGED_BY_YAML.search(text):
        raise _OverrideProblem(
            "has a line end, or a # after a space, which YAML does not keep; put the text in double quotes, with \\n "
            "for a line end"
        )
    parts = match["key"].split(".")
    if len(parts) > _DEEPEST:
        raise _OverrideProblem(f"has {len(parts):,} names joined by dots, but a key has at most {_DEEPEST}")
    if value is None and declared_name(match["key"]) in sections_never_null():
        return _without(tree, parts)
    return _assign(tree, parts, value, "")


def _without(branch: Any, parts: Sequence[str]) -> Any:
    """Copy `branch` without the section at the dotted place, so that its keys take their defaults."""
    if not isinstance(branch, dict) or parts[0] not in branch:
        return branch
    name, rest = parts[0], parts[1:]
    kept = {key: value for key, value in branch.items() if key != name}
    return {**kept, name: _without(branch[name], rest)} if rest else kept


def _assign(branch: Any, parts: Sequence[str], value: Any, prefix: str) -> Any:
    """Copy `branch` with `value` at the dotted place; make the sections that are missing or null."""
    if not parts:
        return value
    name, rest = parts[0], parts[1:]
    here = f"{prefix}.{name}" if prefix else name
    if isinstance(branch, list):
        if not name.isdigit() or int(name) >= len(branch):
            entries = f"its entries are 0 to {len(branch) - 1}" if branch else "it is empty"
            raise _OverrideProblem(f"{prefix} is a list and has no entry {name}; {entries}")
        index = int(name)
        return [*branch[:index], _assign(branch[index], rest, value, here), *branch[index + 1 :]]
    if branch is not None and not isinstance(branch, dict):
        raise _OverrideProblem(f"{prefix} is the value {shown(branch, key=prefix)}, so it has no key {name}")
    if name.isdigit():
        raise _OverrideProblem(f"{prefix or 'the recipe'} is not a list, so it has no entry {name}")
    section = branch or {}
    return {**section, name: _assign(section.get(name), rest, value, here)}


def _judge(tree: dict[str, Any], kind: Kind) -> tuple[Recipe | None, list[Problem]]:
    """Check a recipe by the schema and the rules. If the schema refuses a part, the rules check what does not depend on
    it."""
    if isinstance(rewards := tree.get("rewards"), list):
        tree = {**tree, "rewards": [without_nulls(entry) for entry in rewards]}
    try:
        return _validate(tree, kind), []
    except ValidationError as error:
        if refused := _of_rules(error):
            return None, refused
        problems = _without_meant(schema_problems(error, kind), tree, kind)
        wrong = [location_of(details) for details in error.errors(include_url=False, include_input=False)]
    if any(len(location) > 1 and location[0] == "rewards" for location in wrong):
        # The list is too short only because that entry is missing from it.
        wrong = [location for location in wrong if location != ("rewards",)]
    if () in wrong:
        return None, problems
    try:
        _validate(_with_stand_ins(tree, wrong), kind)
        return None, problems
    except ValidationError as error:
        refused = _of_rules(error)
    unsure = [problem.key for problem in problems]
    # A key that the recipe lacks may be the one that was meant.
    unsure += [path for problem in problems for path in problem.also if not _has(tree, path)]
    return None, problems + [problem for problem in refused if not any(problem.touches(path) for path in unsure)]


def _without_meant(problems: list[Problem], tree: Any, kind: Kind) -> list[Problem]:
    """Leave out that a key is required if an unknown key was meant as it, or as what its section must have."""
    keys = keys_of(kind)
    meant = [path for problem in problems for path in problem.also]
    needed = frozenset(path for pair in ALTERNATIVES for path in pair)
    required = [path for path in meant if (key := keys.get(declared_name(path))) and key.field.is_required()]
    filling = {*required, *needed.intersection(meant), *(path.partition(".")[0] for path in meant if "rewards" in path)}
    filled = {".".join(path.split(".")[:end]) for path in filling for end in range(1, path.count(".") + 2)}
    return [problem for problem in problems if problem.key not in filled or _has(tree, problem.key)]


def _of_rules(error: ValidationError) -> list[Problem]:
    """List what the rules refused in a recipe that the schema allows; empty if the schema refused it."""
    causes = [details.get("ctx", {}).get("error") for details in error.errors(include_url=False, include_input=False)]
    return [problem for cause in causes if isinstance(cause, RuleError) for problem in cause.problems]


def require_sound(recipe: Recipe) -> None:
    """Check a recipe that was made or copied in Python as thoroughly as one that is read from a file, its paths
    included. Raises RecipeError."""
    problems = rule_problems(recipe) + path_problems(recipe.model_dump(mode="json"))
    if lines := [problem.line for problem in problems or deepspeed_problems(recipe)]:
        raise RecipeError(lines)


def _has(tree: Any, path: str) -> bool:
    """Return whether a raw recipe gives the key at a dotted place."""
    for part in path.split("."):
        if isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            return False
    return True


def _validate(tree: Mapping[str, Any], kind: Kind) -> Recipe:
    """Validate by way of JSON, whose strict mode does what you would expect: a list becomes a tuple, but text does not
    become a number."""
    return RECIPES[kind].model_validate_json(json.dumps(tree), strict=True)


def _with_stand_ins(tree: Mapping[str, Any], wrong: Sequence[tuple[int | str, ...]]) -> dict[str, Any]:
    """Copy the recipe with each wrong location left out, or replaced if it is required."""
    copy = json.loads(json.dumps(tree))
    for location in wrong:
        if location[0] == "rewards" and len(location) > 1:
            _mend_entry(copy["rewards"], location[1:])
            continue
        *outer, last = location
        while isinstance(last, int):
            *outer, last = outer  # a list of plain values is left out as a whole
        parent = copy
        for part in outer:
            parent = parent[part]
        path = dotted((*outer, last))
        if path in _STAND_INS:
            parent[last] = _STAND_INS[path]
        else:
            parent.pop(last, None)
    return copy


def _mend_entry(entries: list[Any], location: Sequence[int | str]) -> None:
    """Remove a wrong key from an entry of `rewards`; if its reward needs the key, replace the entry with one that no
    rule refuses."""
    index, *keys = location
    assert isinstance(index, int)
    if len(keys) == 1 and keys[0] != "name" and keys[0] in entries[index]:
        del entries[index][keys[0]]
    else:
        entries[index] = {"call": f"stand_in:entry_{index}", "correct_at": 0}
