"""Write a draft as the text of a recipe, with comments on where each value comes from and on what has no key."""

import json
import re
from itertools import chain
from typing import Any

from tiercel.config.yaml_text import render
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.table import versions

COMMENT_COLUMN = 48
_HEADINGS = {"Look at these: another meaning, or no equivalent.": True, "Nothing to do about these.": False}
_PLAIN = re.compile(r"[\w./-]+(:[\w./-]+)*")


def recipe_text(draft: RecipeDraft) -> str:
    """Return the recipe as YAML with comments."""
    launch = draft.launch
    lines = [
        f"# Made from a command of {launch.framework}. tiercel check RECIPE says what is still missing.",
        f"# Flags and defaults are those of {launch.framework} {versions()[launch.framework]}.",
    ]
    if launch.processes > 1:
        lines.append(f"# It ran {launch.processes} processes: tiercel {launch.kind} RECIPE --nproc {launch.processes}")
    for heading, is_change in _HEADINGS.items():
        if notes := [note for note in draft.notes if note.is_change == is_change]:
            lines += ["#", f"# {heading}"]
            lines += [f"#   {_one_line(note.subject)}: {_one_line(note.text)}" for note in notes]
    lines.append("")
    for section, value in draft.tree.items():
        lines += _lines(section, value, section, draft, 0)
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, key: str, draft: RecipeDraft, depth: int) -> list[str]:
    indent = "  " * depth
    comment = _comment(draft, key)
    if isinstance(value, dict) and key not in draft.origins:
        below = (_lines(leaf, inner, f"{key}.{leaf}", draft, depth + 1) for leaf, inner in value.items())
        return [f"{indent}{name}:", *chain.from_iterable(below)]
    line, entries = f"{indent}{name}: {_inline(value)}", []
    if isinstance(value, list) and value and isinstance(value[0], dict):
        line, entries = f"{indent}{name}:", [f"{indent}  - {_inline(entry)}" for entry in value]
    # There must be a blank before the comment, or else it would be part of the value.
    return [f"{line:<{COMMENT_COLUMN - 1}} # {comment}" if comment else line, *entries]


def _comment(draft: RecipeDraft, key: str) -> str:
    """Return the comment on a key: what was given, without the value if the line shows it."""
    origin = draft.origins.get(key)
    if origin is None:
        return ""
    shown = [_short(draft, key, label) for label in origin.labels]
    return _one_line("; ".join(part for part in (", ".join(shown), origin.remark) if part))


def _short(draft: RecipeDraft, key: str, label: str) -> str:
    """Return what was given in full, if this is its first key and the line does not show its value; otherwise its
    name."""
    given, value = draft.shown(label), draft.values[key]
    first = next(each for each, origin in draft.origins.items() if label in origin.labels)
    if "launcher" in label:
        return given
    name, _, words = given.partition("=" if "--" not in given else " ")
    rendered = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return name if key != first or words.strip("'\"") in (rendered, _inline(value)) else given


def _one_line(text: str) -> str:
    """Put a text into one line, so that it stays a comment whatever a flag contains."""
    return " ".join(text.split())


def _inline(value: Any, *, in_brackets: bool = False) -> str:
    """Return a value as one line of YAML. In brackets, a comma or a bracket would end a text without quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(inner, in_brackets=True)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(inner, in_brackets=True) for inner in value) + "]"
    text = render(value).strip().removesuffix("...").strip()
    needs_quotes = in_brackets and isinstance(value, str) and not _PLAIN.fullmatch(text)
    return json.dumps(value, ensure_ascii=False) if needs_quotes or "\n" in text else text
