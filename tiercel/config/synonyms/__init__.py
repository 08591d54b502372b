"""Read the names that other frameworks and habits use for the keys, sections and words of a recipe. The tables are the
text files beside this one, read when a name is first looked up; their first lines explain the columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from tiercel.tables import table_rows

NOT_YET = "not in this version"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """`key` is what to write instead, if there is such a key; `hint` is what else to know."""

    key: str | None = None
    hint: str = ""


@cache
def key_synonyms() -> Mapping[str, Suggestion]:
    """Read other names of keys. A dotted name also matches the end of a longer one."""
    return {
        name: Suggestion(key=key or None, hint=hint)
        for names, key, hint in table_rows(__name__, "keys.txt")
        for name in names.split(", ")
    }


@cache
def section_synonyms() -> Mapping[str, str]:
    """Read other names of sections."""
    return {name: section for names, section in table_rows(__name__, "sections.txt") for name in names.split(", ")}


@cache
def word_synonyms() -> Mapping[str, Mapping[str, str | None]]:
    """Read other words for values, by the key that takes them; None for a word that is not in this version."""
    words: dict[str, dict[str, str | None]] = {}
    for key, names, word in table_rows(__name__, "words.txt"):
        words.setdefault(key, {}).update(dict.fromkeys(names.split(", "), word or None))
    return words
