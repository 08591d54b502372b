"""Generate the tables of docs/zh/, which correspond to those of docs/: `python -m tools.docs.chinese docs/zh`.

zh/descriptions.json maps every English text in them to its Chinese. A text that has none, or that has changed since,
ends the program.
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tiercel.messages import translated
from tools.docs import algorithms, data, families, recipe, rewards
from tools.docs.tables import write_table

DESCRIPTIONS = Path(__file__).with_name("zh") / "descriptions.json"
LANGUAGE = "zh"
SEMICOLON = "\uff1b"


@cache
def descriptions() -> Mapping[str, str]:
    """Read the Chinese of the texts in tables."""
    return json.loads(DESCRIPTIONS.read_text(encoding="utf-8"))


class Speaker:
    """Translates texts of tables into Chinese. `used` has the entries of descriptions.json that were needed."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def say(self, text: str) -> str:
        """Return the Chinese of a text, or of its parts between semicolons. Raises KeyError if there is none."""
        bare = " ".join(text.split()) or text
        if not re.search("[A-Za-z]{2,}", re.sub("`[^`]*`", "", bare)) and bare not in descriptions():
            return text
        parts = [bare] if bare in descriptions() else bare.split("; ")
        if all(part in descriptions() for part in parts):
            self.used.update(parts)
            return SEMICOLON.join(descriptions()[part] for part in parts)
        if (found := translated(bare, LANGUAGE)) != bare:
            return found
        raise KeyError(f"{DESCRIPTIONS.name} has no Chinese of: {bare}")

    def say_type(self, words: str) -> str:
        """Return the Chinese of a type in words."""
        return translated(words, LANGUAGE)


def tables(speaker: Speaker) -> dict[str, dict[str, str]]:
    """Return the tables by page and name."""
    say = speaker.say
    catalogues = {
        "losses": algorithms.LOSSES,
        "ratios": algorithms.RATIOS,
        "surrogates": algorithms.SURROGATES,
        "means": algorithms.NORMALISERS,
        "advantages": algorithms.ADVANTAGES,
        "divergences": algorithms.KL_ESTIMATORS,
        "pairs": algorithms.PAIR_LOSSES,
        "pair divergences": algorithms.F_DIVERGENCES,
        "teachers": algorithms.DIVERGENCES,
        "tokens": algorithms.TOKEN_LOSSES,
    }
    return {
        "recipe.md": {"keys": recipe.render_keys(say, speaker.say_type)},
        "algorithms.md": {
            **{name: algorithms.catalogue(entries, say) for name, entries in catalogues.items()},
            "around": algorithms.around_table(say),
            "trl": algorithms.differences_table(say),
            "labels": algorithms.losses_table(algorithms.LABEL_LOSSES, say),
            "values": algorithms.losses_table(algorithms.VALUE_LOSSES, say),
        },
        "rewards.md": {rewards.TABLE: rewards.table(say)},
        "data.md": {data.TABLE: data.table(say)},
        "families.md": families.tables(say),
    }


if __name__ == "__main__":
    for page, named in tables(Speaker()).items():
        for name, table in named.items():
            write_table(Path(sys.argv[1]) / page, name, table)
