"""List all kinds of reward, by the names that recipes give them; docs/rewards.md has a table of the built-in ones."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from tiercel.config_base import Keys, Problems
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.external import STARTED, ByCall, OfEnvironment
from tiercel.rewards.grounding import GROUNDING
from tiercel.rewards.shape import SHAPE
from tiercel.rewards.text import WORDING

KINDS: tuple[type[RewardEntry], ...] = (*WORDING, *GROUNDING, *SHAPE, OfEnvironment, *STARTED)
CALL = "call"
BY_NAME: dict[str, type[RewardEntry]] = {kind.model_fields["name"].default or CALL: kind for kind in KINDS}
BUILTIN = {name: kind for name, kind in BY_NAME.items() if kind is not ByCall}
TELLS_RIGHT = tuple(name for name, kind in BUILTIN.items() if kind.own_right_from is not None)
OF_EVERY_REWARD = tuple(RewardEntry.model_fields)
OPTIONS = tuple(dict.fromkeys(key for kind in KINDS for key in kind.model_fields if key not in OF_EVERY_REWARD))


def takers(option: str) -> tuple[str, ...]:
    """List the rewards that have an option."""
    return tuple(name for name, kind in BY_NAME.items() if option in kind.model_fields)


MOST_NAMED = 6  # the meaning of an option that more rewards have is given without their names


class UnresolvedReward(RewardEntry):
    """One reward: a built-in by `name`, or your own function by `call`."""

    call: str | None = None

    @classmethod
    def meanings(cls) -> Mapping[str, str]:
        """Join what each option means to the rewards that have it, with their names."""
        return {**RewardEntry.meanings(), **{option: _meaning(option) for option in OPTIONS}}

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        both = f"has both name ({self.name}) and call ({self.call}); use one entry for each"
        yield Keys("").problem("has neither name nor call; give one of them" if self.name is None else both)


def _meaning(option: str) -> str:
    """Join what an option means to the rewards that have it: `length: ... cosine: ...`."""
    names: dict[str, list[str]] = {}
    for name in takers(option):
        names.setdefault(BY_NAME[name].meanings().get(option, ""), []).append(name)
    return " ".join(
        text if len(each) > MOST_NAMED or option == CALL else f"{', '.join(each)}: {lowered(text)}"
        for text, each in names.items()
    )


def lowered(text: str) -> str:
    """Return a text as it continues a sentence, with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def _optional(option: str) -> Any:
    """Return the type of an option that some rewards have, made nullable, and null as its default."""
    field = BY_NAME[takers(option)[0]].model_fields[option]
    parts: Any = (field.annotation, *field.metadata)
    declared: Any = Annotated[parts] if field.metadata else field.annotation
    return declared | None, None


_NAMES: Any = Literal[tuple(BUILTIN)]

# The options of all rewards, each optional: the schema of an entry that names no reward, or two, and the list of all
# keys.
AnyEntry = create_model(
    "AnyEntry",
    __base__=UnresolvedReward,
    __doc__=UnresolvedReward.__doc__,
    name=(_NAMES | None, None),
    **{option: _optional(option) for option in OPTIONS},
)
_SECTIONS: dict[str, type[RewardEntry]] = {
    "(unclear)": AnyEntry,
    **{f"({name})": kind for name, kind in BY_NAME.items()},
}
TAGS = tuple(_SECTIONS)  # pydantic puts these into the locations of its errors


class RewardByName:
    """Tells pydantic which kind of reward an entry is, by its `name` or `call`."""

    section = AnyEntry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag: handler.generate_schema(section) for tag, section in _SECTIONS.items()}
        return core_schema.tagged_union_schema(choices, discriminator=_tag)


def _tag(entry: Any) -> str:
    if isinstance(entry, RewardEntry):
        return "(unclear)" if isinstance(entry, UnresolvedReward) else f"({entry.name or CALL})"
    return "(unclear)" if (name := named(entry)) is None else f"({name})"


def named(entry: Any) -> str | None:
    """Return the name of a raw entry's reward, "call" for a function of the user; None if it is not clear."""
    name, call = (entry.get("name"), entry.get(CALL)) if isinstance(entry, Mapping) else (None, None)
    if call is not None:
        return CALL if name is None else None
    return name if isinstance(name, str) and name in BUILTIN else None


def without_nulls(entry: Any) -> Any:
    """Return a raw entry without two kinds of null keys: options of other rewards, which a recipe may write as null,
    and options that its own reward requires, which are then reported as missing."""
    if (name := named(entry)) is None:
        return entry
    fields = BY_NAME[name].model_fields
    dropped = {key for key in OPTIONS if key not in fields or fields[key].is_required()}
    return {key: value for key, value in entry.items() if value is not None or key not in dropped}
