"""Parse commands of EasyR1 and verl, whose settings are words KEY=VALUE with dotted keys."""

import re
from collections.abc import Sequence

from tiercel.convert.values import mapping_in

_OVERRIDE = re.compile(r"(?P<add>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


def override_words(words: Sequence[str]) -> list[str]:
    """Rewrite each KEY=VALUE as the flag --KEY with its values; words that belong to no flag come first."""
    written: list[str] = []
    strays: list[str] = []
    for before, word in zip(("", *words), words, strict=False):
        if match := _OVERRIDE.fullmatch(word):
            values = values_of(match["value"]) or ["null"]
            written += [f"--{match['key']}={values[0]}", *values[1:]]
        elif word.startswith("--") or (before.startswith("--") and "=" not in before):
            written.append(word)
        else:
            strays.append(word)
    return [*strays, *written]


def values_of(text: str) -> list[str]:
    """Return the values of a list such as ["a", "b"], or else the text without the quotes around it."""
    if text.startswith("[") and text.endswith("]"):
        items = (mapping_in(f"x: {text}") or {}).get("x")
        return [str(item) for item in items] if isinstance(items, list) else [text]
    return [text.strip("'\"")] if len(text) > 1 else [text]
