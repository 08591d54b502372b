"""List the keys of a recipe as the schema declares them: their dotted names, types in words and defaults.

Entries of a list of sections are numbered; a key of any entry is written with `N`, as in `rewards.N.name`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tiercel.config.schema import DistillRecipe, DpoRecipe, GrpoRecipe, Kind, KtoRecipe, Recipe, RewardRecipe, SftRecipe
from tiercel.config_base import Section
from tiercel.rewards.registry import RewardByName

RECIPES: dict[Kind, type[Recipe]] = {
    each.kind: each for each in (SftRecipe, DpoRecipe, KtoRecipe, RewardRecipe, DistillRecipe, GrpoRecipe)
}


def _parent(recipe: type[Recipe]) -> type[Section]:
    return next(each for each in recipe.__mro__[1:] if issubclass(each, Section))


# The sections that distinguish a kind of recipe from those before it; an SFT recipe has none.
OWN_SECTIONS: dict[Kind, tuple[str, ...]] = {
    kind: tuple(name for name in recipe.model_fields if name not in _parent(recipe).model_fields)
    for kind, recipe in RECIPES.items()
}
ENTRY = "N"


# How kinds are written whose names are not abbreviations in capitals.
WORDS: dict[Kind, str] = {"reward": "reward-model", "distill": "distillation"}


def named(kind: Kind) -> str:
    """Return a kind of recipe with its article, for use in a sentence."""
    return f"{'an' if kind == 'sft' else 'a'} {WORDS.get(kind, kind.upper())}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the recipe tree, either a section or a leaf."""

    path: str
    section: type[Section] | None  # the section below, if the key is a section or a list of sections
    is_list_of_sections: bool
    field: FieldInfo
    holder: type[Section]  # the section that the key belongs to

    @property
    def meaning(self) -> str:
        """Return its line in docs/recipe.md; empty for a section, whose class has a docstring."""
        return self.holder.meanings().get(self.leaf, "")

    @property
    def leaf(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        """Return the dotted name of the section that contains the key; empty at the top level."""
        return self.path.rpartition(".")[0]


@cache
def keys_of(kind: Kind) -> Mapping[str, Key]:
    """Map the dotted name of each key of a kind of recipe to the key, in the order of the schema."""
    return {key.path: key for key in _walk(RECIPES[kind], "")}


@cache
def every_key() -> tuple[Key, ...]:
    """List the keys of all kinds of recipes, each name once."""
    return tuple({path: key for kind in RECIPES for path, key in keys_of(kind).items()}.values())


@cache
def sections_never_null() -> frozenset[str]:
    """Return the dotted names of the sections that may be left out but may not be null."""
    found = (key for key in every_key() if key.field.annotation is key.section and not key.field.is_required())
    return frozenset(key.path for key in found)


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        nested, is_list = _nested_section(field.annotation)
        key = Key(path=prefix + name, section=nested, is_list_of_sections=is_list, field=field, holder=section)
        yield key
        if nested is not None:
            yield from _walk(nested, f"{key.path}.{ENTRY}." if is_list else f"{key.path}.")


def _nested_section(annotation: Any) -> tuple[type[Section] | None, bool]:
    if isinstance(annotation, RewardByName):
        return annotation.section, False
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    is_list = get_origin(annotation) is tuple
    for argument in reversed(get_args(annotation)):  # the argument that determines the section comes after its type
        nested, inner_is_list = _nested_section(argument)
        if nested is not None:
            return nested, is_list or inner_is_list
    return None, False


def declared_name(path: str) -> str:
    """Return the dotted name as it is in the schema: entry numbers become `N` (`rewards.0.name` ->
    `rewards.N.name`)."""
    return ".".join(ENTRY if part.isdigit() else part for part in path.split("."))


def type_in_words(field: FieldInfo) -> str:
    """Describe the type of a leaf in plain words, with its bounds: `whole number, at least 1, or null`."""
    return _in_words(field.annotation, field.metadata)


def allowed_words(annotation: Any) -> tuple[str, ...]:
    """List the words that a key accepts if it is a Literal, an optional Literal or a list of one; empty otherwise."""
    if get_origin(annotation) is Literal:
        return tuple(str(word).lower() if isinstance(word, bool) else str(word) for word in get_args(annotation))
    return tuple(word for argument in get_args(annotation) for word in allowed_words(argument))


def _in_words(annotation: Any, metadata: list[Any]) -> str:
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        base, *extras = arguments
        return _in_words(base, [item for extra in extras for item in getattr(extra, "metadata", [extra])])
    if origin in (Union, UnionType):
        others = [argument for argument in arguments if argument is not NoneType]
        words = " or ".join(_in_words(other, metadata) for other in others)
        return f"{words}, or null" if len(others) < len(arguments) else words
    if origin is Literal:
        words = ", ".join(f"`{word}`" for word in allowed_words(annotation))
        return f"one of {words}" if len(arguments) > 1 else words
    if origin is tuple:
        item = _in_words(arguments[0], [])
        return f"list: each {item}" if arguments[-1] is Ellipsis else f"list of {len(arguments)}: each {item}"
    if origin is Mapping:
        return "texts by name" if arguments[1] is str else "values by name"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"section with {' or '.join(annotation.model_fields)}"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return ", ".join([names.get(annotation, str(annotation)), *_bounds(metadata)])


def _bounds(metadata: list[Any]) -> Iterator[str]:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    for item in metadata:
        yield from (f"{word} {getattr(item, name):g}" for name, word in words.items() if hasattr(item, name))
