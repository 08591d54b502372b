"""Recognise which program of a peer a command starts, and commands of methods and frameworks that are not supported."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import cast

from tiercel.convert.table import KINDS, PEERS, Framework, Method, environment_row, rows_of
from tiercel.tables import table_rows

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3", "uv")
LLAMA_FACTORY_SCRIPTS = ("train.py", "train_bash.py", "launcher.py")
SETTINGS = (".yaml", ".yml", ".json")
METHODS: dict[str, Method] = {**{name: name for name in KINDS}, "gspo": "grpo", "mpo": "dpo", "reward": "rm"}
OTHER_METHODS = {  # and the command that comes nearest
    **dict.fromkeys(("bco", "online", "xpo", "nash", "tpo"), "tiercel dpo"),
    **dict.fromkeys(("gold", "async", "server", "ssd", "sdft", "sdpo"), "tiercel distill"),
    **{"ppo": "tiercel grpo", "harbor": "tiercel grpo", "prm": "tiercel reward", "pt": "tiercel sft"},
}
VERBS = f"tiercel {', '.join(dict.fromkeys(KINDS.values()))}"
# Words of flags that say what is trained: if the framework does not know such a flag, the script is not one of its own.
_DECISIVE = {"lora", "peft", "adapter", "freeze", "frozen", "unfreeze", "tune", "tunable", "trainable", "model", "llm"}
_SETTING = re.compile(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=")  # as Hydra takes them


@dataclass(frozen=True, slots=True)
class Foreign:
    """A training command of a method that this version does not have, or of a framework that is not supported."""

    told: str  # the message for the user


def no_method(word: str, nearest: str) -> Foreign:
    """Say that what a word names is not a method of this version."""
    return Foreign(f"{word} is not a method of this version; nearest: {nearest}")


@cache
def _programs() -> tuple[list[str], ...]:
    """Read the programs, scripts and modules that are known by their names."""
    return tuple(table_rows(PEERS, "programs.txt"))


def start_of(words: Sequence[str]) -> tuple[int, Framework, Method | None] | Foreign | None:
    """Return the place where the flags begin, the framework, and the method, which is None if a flag names it. Return
    Foreign for a command that is not supported, and None if the command does not train."""
    for i, word in enumerate(words[:-1]):
        name, following = PurePath(word).name, words[i + 1]
        for program, second, framework, method, nearest in _programs():
            if name == program and nearest and second in ("", following):
                return no_method(f"{name} {second}".strip(), nearest)
            if name == program and second in ("", following):
                return i + 1 + bool(second), cast(Framework, framework), cast(Method | None, method or None)
        if name == "trl" and following in (*METHODS, *OTHER_METHODS):
            if following in OTHER_METHODS:
                return no_method(f"trl {following}", OTHER_METHODS[following])
            return i + 2, "TRL", METHODS[following]
        if name in ("rlhf.py", "sft.py") and "swift" in PurePath(word).parts:
            return i + 1, "ms-swift", None if name == "rlhf.py" else "sft"
        if name == "grpo.py" and "open_r1" in PurePath(word).parts and "--config" not in words:  # R1-V and its kin
            return stranger(name, words[i + 1 :], "VLM-R1", "grpo") or (i + 1, "VLM-R1", "grpo")
        if name.endswith(".py") and any(PurePath(before).name in LAUNCHERS for before in words[:i]):
            return _by_script(i, name, words[i + 1 :])
    return None


def _by_script(place: int, name: str, after: Sequence[str]) -> tuple[int, Framework, Method | None] | Foreign | None:
    """Recognise a Python script. Its name or its flags tell the method; its flags are assumed to be TRL's, except for
    LLaMA-Factory's scripts."""
    if name in LLAMA_FACTORY_SCRIPTS and (after[0].endswith(SETTINGS) or "--stage" in after):
        return place + 1, "LLaMA-Factory", None
    parts = re.split(r"[^a-z0-9]+", name.lower().removesuffix(".py"))
    if other := next((part for part in parts if part in OTHER_METHODS), None):
        return no_method(name, OTHER_METHODS[other])
    method = next((method for word, method in METHODS.items() if word in parts), None)
    if method is None and "--num_generations" in after:
        method = "grpo"
    is_training = any(word.partition("=")[0] in ("--model_name_or_path", "--output_dir") for word in after)
    if method is None:
        text = f"{name} does not say by its name what it trains; nearest: {VERBS}"
        return Foreign(text) if is_training else None
    return stranger(name, after, "TRL", method) or (place + 1, "TRL", method)


def stranger(script: str, after: Sequence[str], framework: Framework, method: Method) -> Foreign | None:
    """Return Foreign if a script's flags are not those of the framework that its name suggests: because an unknown one
    says what is trained, because at least every third is unknown, or because words are settings KEY.KEY=VALUE."""
    given = [word[2:].partition("=")[0].replace("-", "_") for word in after if re.match(r"--[A-Za-z]", word)]
    own = rows_of(framework, method)
    unknown = list(dict.fromkeys(flag for flag in given if flag not in own and not environment_row(f"launcher {flag}")))
    settings = [word.partition("=")[0] for word in after if _SETTING.match(word)]
    is_decisive = bool(settings) or any(_DECISIVE & set(flag.lower().split("_")) for flag in unknown)
    if not is_decisive and (not unknown or len(unknown) * 3 < len(set(given))):
        return None
    named = [*settings, *(f"--{flag}" for flag in unknown)]
    shown = ", ".join(named[:4]) + (" ..." if len(named) > 4 else "")
    command = f"trl {method}" if framework == "TRL" else "grpo_jsonl.py"
    return Foreign(f"{script} is not a script of {framework}, which has no {shown}; nearest: the flags of `{command}`")
