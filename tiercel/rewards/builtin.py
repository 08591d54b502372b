"""All kinds of reward, and which of them an entry of the recipe is; docs/rewards.md has the table of the built-in ones.

python -m tiercel.rewards.builtin docs/rewards.md        writes it there
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from tiercel.documents import write_table
from tiercel.rewards.entry import Entry
from tiercel.rewards.grounding import GROUNDING
from tiercel.rewards.shape import SHAPE
from tiercel.rewards.started import STARTED, ByCall
from tiercel.rewards.wording import WORDING
from tiercel.sections import Problem, Problems

KINDS: tuple[type[Entry], ...] = (*WORDING, *GROUNDING, *SHAPE, *STARTED)
CALL = "call"
BY_NAME: dict[str, type[Entry]] = {kind.model_fields["name"].default or CALL: kind for kind in KINDS}
BUILTIN = {name: kind for name, kind in BY_NAME.items() if kind is not ByCall}
TELLS_RIGHT = tuple(name for name, kind in BUILTIN.items() if getattr(kind, "own_right_from", None) is not None)
OF_EVERY_REWARD = tuple(Entry.model_fields)
MOST_NAMED = 6  # a key of more rewards is described without their names


def options_of(name: str) -> tuple[str, ...]:
    """The keys that a reward takes beside those of every reward; `name` may be "call"."""
    own = [key for key in BY_NAME[name].model_fields if key not in (*OF_EVERY_REWARD, CALL)]
    return tuple(sorted(own, key=("answer_column", "correct_at").__contains__))  # its own first


def takers(option: str) -> tuple[str, ...]:
    """The rewards that take a key."""
    return tuple(name for name, kind in BY_NAME.items() if option in kind.model_fields)


class Unclear(Entry):
    """One reward: a built-in by `name`, or your own function by `call`."""

    call: str | None = None

    @classmethod
    def meanings(cls) -> Mapping[str, str]:
        """Join what each key means to the rewards that take it, with their names."""
        return {**Entry.meanings(), **{option: _meaning(option) for option in OPTIONS}}

    def problems(self, before: Sequence[Entry]) -> Problems:
        both = f"has both name ({self.name}) and call ({self.call}); write an entry for each"
        yield Problem(key="", text="has neither name nor call; write one of them" if self.name is None else both)


def _meaning(option: str) -> str:
    names: dict[str, list[str]] = {}
    for name in takers(option):
        names.setdefault(BY_NAME[name].meanings().get(option, ""), []).append(name)
    return " ".join(
        text if len(each) > MOST_NAMED or option == CALL else f"{', '.join(each)}: {lowered(text)}"
        for text, each in names.items()
    )


def lowered(text: str) -> str:
    """Return a text as the rest of a sentence."""
    return text[:1].lower() + text[1:]


def _optional(option: str) -> Any:
    """Return the type of a key of some rewards, with null, and null as its default."""
    field = BY_NAME[takers(option)[0]].model_fields[option]
    declared: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return declared | None, None


OPTIONS = tuple(dict.fromkeys(key for kind in KINDS for key in kind.model_fields if key not in OF_EVERY_REWARD))
_NAMES: Any = Literal[tuple(BUILTIN)]
# The keys of all rewards, each optional: what an entry is that names no reward, or two, and what keys there are.
AnyEntry = create_model(
    "AnyEntry",
    __base__=Unclear,
    __doc__=Unclear.__doc__,
    name=(_NAMES | None, None),
    **{option: _optional(option) for option in OPTIONS},
)
_SECTIONS: dict[str, type[Entry]] = {"(unclear)": AnyEntry, **{f"({name})": kind for name, kind in BY_NAME.items()}}
TAGS = tuple(_SECTIONS)  # pydantic puts them into its locations


class OneReward:
    """Tells pydantic which kind of reward an entry is, by its `name` or `call`."""

    section = AnyEntry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag: handler.generate_schema(section) for tag, section in _SECTIONS.items()}
        return core_schema.tagged_union_schema(choices, discriminator=_tag)


def _tag(entry: Any) -> str:
    if isinstance(entry, Entry):
        return "(unclear)" if isinstance(entry, Unclear) else f"({entry.name or CALL})"
    return "(unclear)" if (name := named(entry)) is None else f"({name})"


def named(entry: Any) -> str | None:
    """Return the name of a raw entry's reward, "call" for the user's own; None where it is not clear."""
    name, call = (entry.get("name"), entry.get(CALL)) if isinstance(entry, Mapping) else (None, None)
    if call is not None:
        return CALL if name is None else None
    return name if isinstance(name, str) and name in BUILTIN else None


def without_nulls(entry: Any) -> Any:
    """Return a raw entry without the keys of other rewards that are null, which a recipe may give."""
    if (name := named(entry)) is None:
        return entry
    foreign = set(OPTIONS) - set(BY_NAME[name].model_fields)
    return {key: value for key, value in entry.items() if value is not None or key not in foreign}


NAME = "built-in rewards"


def table() -> str:
    """Return the built-in rewards as docs/rewards.md lists them."""
    lines = ["| name | what it takes as the answer | value | options | right from |", "|---|---|---|---|---|"]
    for name, kind in BUILTIN.items():
        value = (inspect.getdoc(kind) or "").replace("\n", " ").replace("|", "\\|")
        options = ", ".join(f"`{option}`" for option in options_of(name) if option != "correct_at") or "-"
        own = getattr(kind, "own_right_from", None)
        right = "-" if own is None else f"{own:g}"
        needs = f"; needs the package {kind.needs}" if kind.needs else ""
        lines.append(f"| `{name}` | {kind.reads} | {value}{needs} | {options} | {right} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), NAME, table())
