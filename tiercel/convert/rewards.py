"""Convert rewards from the peers' names."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

from tiercel.config.yaml_text import parse
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.rows import EXAMPLE_SCRIPTS
from tiercel.convert.table import PEERS, words_of
from tiercel.convert.values import number_of
from tiercel.tables import table_rows


def registered(file: Path) -> dict[str, str]:
    """Return classes and functions by the names that `orms['name'] = Class` gives them, and all top-level ones by their
    own names; empty if the file cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    own: dict[str, str] = {}
    named: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own[node.name] = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                match target:
                    case ast.Subscript(value=ast.Name(id="orms"), slice=ast.Constant(value=name)):
                        named[str(name)] = node.value.id
    return {**own, **named}


_BOX = r"\[\d+,\s*\d+,\s*\d+,\s*\d+\]"


@cache
def _fixed() -> dict[tuple[str, str], tuple[dict[str, Any], str]]:
    """Read the entries that no flag changes, each with a note, by peer and name."""
    rows = table_rows(PEERS, "rewards.txt")
    return {(peer, name): (parse(entry)[0], note) for peer, names, entry, note in rows for name in names.split(", ")}


def set_rewards(launch: Launch, draft: RecipeDraft) -> None:
    """Set the list of rewards with their weights."""
    if launch.kind != "grpo":
        return
    by_script = ("think_format_reward", "accuracy_reward") if launch.script in EXAMPLE_SCRIPTS else ()
    names = launch.words("reward_funcs") or by_script
    paths = (*launch.words("reward_model"), *launch.words("reward_model_name_or_path"))
    models: list[dict[str, Any]] = [{"name": "model", "model": {"path": path}} for path in paths]
    is_first = launch.framework == "TRL"  # its model; the weights follow the order
    own = [_entry(launch, draft, name, place) for place, name in enumerate(names, len(models) if is_first else 0)]
    entries = [*models, *own] if is_first else [*own, *models]
    for number, weight in enumerate(launch.words("reward_weights")[: len(entries)]):
        entries[number]["weight"] = float(number_of("--reward_weights", weight))
    flags = ("reward_funcs", "reward_model", "reward_model_name_or_path", "reward_weights")
    remark = launch.default_remark(*flags)
    if entries:
        remark = f"of {launch.script}" if remark and by_script else remark
        draft.set("rewards", entries, *flags, remark=remark)
    else:
        draft.note("name the rewards: rewards: [{name: exact}]", subject="no --reward_funcs")


def _entry(launch: Launch, draft: RecipeDraft, name: str, number: int) -> dict[str, Any]:
    if launch.framework == "VLM-R1" and (entry := _of_vlm_r1(launch, draft, name)):
        return entry
    if entry := _of_flags(launch, draft, name):
        return entry
    fixed, note = _fixed().get((launch.framework, name), (None, ""))
    if note:
        draft.note(note, subject=f"--reward_funcs {name}")
    return _own(launch, draft, name, number) if fixed is None else dict(fixed)


def _of_vlm_r1(launch: Launch, draft: RecipeDraft, name: str) -> dict[str, Any] | None:
    """Convert VLM-R1's rewards for referring expressions, and accuracy by its method; None for any other reward."""
    labels = ("is_reward_customized_from_vlm_module", "reward_method", "task_type")
    is_rec = launch.script.startswith("grpo_rec") or launch.is_true("is_reward_customized_from_vlm_module")
    if name == "format" and is_rec:
        box = rf".*\{{.*{_BOX}.*\}}.*" if "qwen" in draft.model_name else rf".*{_BOX}.*"
        return {"name": "format", "pattern": rf".*<think>.*</think>\s*<answer>{box}</answer>.*"}
    if name != "accuracy":
        return None
    if is_rec:
        draft.note("the reward of referring expressions: vlm_r1_rec", *labels, is_change=False)
        return {"name": "vlm_r1_rec"}
    method = launch.text("reward_method") or "default"
    known = words_of("reward_method").get(method.partition(":")[0])
    if known is None:
        text = f"accuracy judged by {method} has no equivalent: name a built-in (docs/rewards.md), or call a function"
        draft.note(text, *labels, subject="--reward_funcs accuracy")
        return {"call": "mine.py:accuracy"}
    draft.note(f"the built-in {known} comes nearest: docs/rewards.md", *labels)
    return {"name": known}


def _of_flags(launch: Launch, draft: RecipeDraft, name: str) -> dict[str, Any] | None:
    """Convert a reward whose numbers are set by flags; None for any other reward."""
    subject = f"--reward_funcs {name}"
    longest = int(draft.values.get("rollout.max_new_tokens", 256))
    if name == "repetition":
        draft.note("docs/rewards.md says what it counts", "repetition_n_grams", subject=subject)
        return {"name": name, "ngram": launch.number("repetition_n_grams") or 3}
    if name == "cosine":
        longest = launch.number("cosine_max_len") or longest
        draft.note(f"ends at {longest} tokens", "cosine_max_len", is_change=False, subject=subject)
        return {"name": name, "max_tokens": longest}
    if name == "length":
        draft.note("tiercel's reward falls from max_tokens on: docs/rewards.md", subject=subject)
        return {"name": name, "max_tokens": longest}
    if name != "soft_overlong":
        return None
    longest, buffer = launch.number("soft_max_length") or longest, launch.number("soft_cache_length") or 50
    text = f"-1 from {longest} tokens on, falling over {buffer}"
    draft.note(text, "soft_max_length", "soft_cache_length", is_change=False, subject=subject)
    return {"name": name, "max_tokens": longest, "buffer": buffer}


def _own(launch: Launch, draft: RecipeDraft, name: str, number: int) -> dict[str, Any]:
    """Convert a reward of the user: from a plugin file if it is found there, or else with a note."""
    if launch.framework == "TRL" and "." in name:
        module, _, function = name.rpartition(".")
        return {"call": f"{module}:{function}"}
    plugins = launch.words("external_plugins")
    known_names = {plugin: registered(file) for plugin in plugins if (file := launch.file(plugin)) is not None}
    for plugin, known in known_names.items():
        if found := known.get(name):
            draft.note(f"{name} is {found} of {plugin}", "external_plugins", is_change=False)
            return {"call": f"{plugin}:{found}"}
    place = next(iter((*known_names, *plugins)), "mine.py")
    asked = "name its file"
    if known_names:
        listed = ", ".join(each for each in known_names[place] if not each.startswith("_")) or "none"
        draft.left.append(f"rewards.{number}.call: {place} has no function {name}; its functions are: {listed}")
        asked = f"{place} has no such name; it has {listed}"
    elif plugins:
        asked = f"{place} is not on this machine"
    text = f"{asked}; write rewards.N.call: FILE.py:CLASS or FILE.py:FUNCTION"
    draft.note(text, "external_plugins", subject=f"--reward_funcs {name}")
    return {"call": f"{place}:{name}"}
