"""The base of the recipe's sections: a frozen class, types of numbers, and the form of a problem."""

import ast
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from tiercel.message_text import brief
from tiercel.secret_names import REDACTED, harmless

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
# Of a key that may have several forms; pydantic puts these into its locations.
TEXT_FORM, SECTION_FORM, LIST_FORM = "(text)", "(section)", "(list)"


class Section(BaseModel):
    """A frozen section of the recipe. A key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, hide_input_in_errors=True)

    @classmethod
    def meanings(cls) -> Mapping[str, str]:
        """Read the docstrings that follow the keys. This is done on demand, because it takes longer than most
        commands."""
        found: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Section) and base is not Section:
                found |= _docstrings_after_keys(base)
        return found

    def changed(self, *keys: str) -> list[str]:
        """Return those of these keys whose values are not their defaults."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].default]

    def leaves(self, above: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the dotted key and the value of each leaf. Entries of a list of sections are numbered."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section):
                yield from value.leaves(f"{above}{name}.")
            elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
                for index, item in enumerate(value):
                    yield from item.leaves(f"{above}{name}.{index}.")
            else:
                yield f"{above}{name}", value

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values at dotted keys. They are not validated."""
        changed = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            inner = getattr(changed, name).with_values({rest: value}) if rest else value
            changed = changed.model_copy(update={name: inner})
        return changed


@cache
def _docstrings_after_keys(section: type[Section]) -> Mapping[str, str]:
    (statement,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(statement, ast.ClassDef)
    return {
        key.target.id: inspect.cleandoc(text.value.value)
        for key, text in zip(statement.body, statement.body[1:], strict=False)
        if isinstance(key, ast.AnnAssign) and isinstance(key.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


class Source(Section):
    """Where a checkpoint comes from."""

    path: str
    """A local directory with a config.json, or a model id on the hub."""
    hub: Literal["huggingface", "modelscope"] = "huggingface"
    """Where a model id is looked up; a local directory never asks."""
    revision: str | None = None
    """The commit, tag or branch of a hub model; null takes the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One line for the user. `also` names further keys that the check read."""

    key: str
    text: str
    also: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        return f"{self.key}: {self.text}"

    def touches(self, path: str) -> bool:
        """Return whether the check read `path`, a key inside it, or a section that contains it."""
        return any(
            key == path or key.startswith(path + ".") or path.startswith(key + ".") for key in (self.key, *self.also)
        )

    def below(self, section: str) -> "Problem":
        """Return the same problem, with its keys extended by the section or entry that they are in."""
        return replace(
            self,
            key=f"{section}.{self.key}" if self.key else section,
            also=tuple(f"{section}.{key}" for key in self.also),
        )


Problems = Iterator[Problem]


class RuleError(ValueError):
    """Raised in validation if rules between keys refuse a recipe. Pydantic turns it into its ValidationError."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(problem.line for problem in problems))


class Keys:
    """The key at which a problem is reported, and further keys that the check read."""

    def __init__(self, key: str, *also: str):
        self.key, self.also = key, also

    def problem(self, text: str) -> Problem:
        """Return a problem of these keys. `text` has the given value, what is wrong with it, and what to write
        instead."""
        return Problem(key=self.key, text=text, also=self.also)


def shown(value: Any, limit: int = 60, *, key: str = "") -> str:
    """Format a value as in YAML, on one line, shortened to about `limit` characters, without secrets. `key` has the
    same meaning as in `harmless`."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    told = harmless(value, key)
    return REDACTED if told == REDACTED else brief(json.dumps(told, ensure_ascii=False, default=str), limit)


def address_fault(url: str) -> str | None:
    """Return what is wrong with a server's address, or None. An address with a name and password is not shown."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is {shown(url)}, which is not a valid address ({error})"
    if parts.username is not None or parts.password is not None:
        return "is an address with a name or password, which would be saved to files; put the key into the environment"
    if parts.scheme not in ("http", "https") or not host:
        return f"is {shown(url)}, which is not a valid address"
    return None


def regex_fault(pattern: str) -> str | None:
    """Return why a text is not a regular expression, or None if it is one."""
    try:
        re.compile(pattern)
    except re.error as error:
        return str(error)
    return None


def form_of(value: Any) -> str:
    """Return the form of a value whose key accepts a text or a section, as the tag for pydantic."""
    return SECTION_FORM if isinstance(value, dict | Section) else TEXT_FORM


def list_or(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return the function that gives the form of a value whose key accepts a list too."""
    return lambda value: LIST_FORM if isinstance(value, list | tuple) else form(value)
