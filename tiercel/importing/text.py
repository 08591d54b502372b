"""A draft as the text of a recipe: a comment for what each value came from, and one for every flag that has no key."""

from typing import Any

from tiercel.config.keys import keys_of
from tiercel.config.yaml_text import render
from tiercel.importing.conversion import Draft
from tiercel.importing.launches import Launch

SECTIONS = (
    "model", "lora", "freeze", "data", "rewards", "rollout", "algorithm", "learner", "optim", "train", "reliability",
    "output",
)  # fmt: skip
COMMENT_COLUMN = 48


def recipe_text(launch: Launch, draft: Draft) -> str:
    """YAML with comments."""
    lines = [f"# Made from a command of {launch.framework}. tiercel check RECIPE says what is still missing."]
    if launch.processes > 1:
        lines.append(f"# It ran {launch.processes} processes: tiercel {launch.kind} RECIPE --nproc {launch.processes}")
    if draft.notes:
        lines += ["#", "# Flags with another meaning, or without an equivalent:"]
        lines += [f"#   {_one_line(flag)}: {note}" for flag, note in draft.notes]
    lines.append("")
    tree: dict[str, Any] = {}
    for key, value in draft.values.items():
        branch = tree
        *sections, leaf = key.split(".")
        for name in sections:
            branch = branch.setdefault(name, {})
        branch[leaf] = value
    for section in SECTIONS:
        if section in tree:
            lines += _lines(section, tree[section], section, draft, 0)
    return "\n".join(lines) + "\n"


def _lines(name: str, value: Any, key: str, draft: Draft, depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(value, dict):
        ordered = sorted(value.items(), key=lambda item: _place(f"{key}.{item[0]}"))
        below = [line for leaf, inner in ordered for line in _lines(leaf, inner, f"{key}.{leaf}", draft, depth + 1)]
        return [f"{indent}{name}:", *below]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        entries = [f"{indent}  - {_inline(entry)}" for entry in value]
        return [f"{indent}{name}:", *entries]
    line = f"{indent}{name}: {_inline(value)}"
    origin = draft.origins.get(key)
    return [f"{line:<{COMMENT_COLUMN}}# {_one_line(origin)}" if origin else line]


def _one_line(text: str) -> str:
    """What stays a comment, whatever a flag holds."""
    return " ".join(text.split())


def _inline(value: Any) -> str:
    """One line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(inner) for inner in value) + "]"
    return render(value).strip().removesuffix("...").strip()


def _place(key: str) -> int:
    """In the order of the schema."""
    keys = list(keys_of("grpo"))
    return keys.index(key) if key in keys else len(keys)
