"""Which framework a command starts, on how many processes, with which flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from tiercel.config.keys import Kind
from tiercel.importing.shell import Command

Framework = Literal["ms-swift", "TRL", "VLM-R1"]
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "python", "python3")
VLM_R1_SCRIPTS = ("grpo_rec.py", "grpo_jsonl.py", "grpo_rec_lora.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A training command. Flags are named without dashes, `-` as `_`; the last one of a name counts."""

    framework: Framework
    kind: Kind
    processes: int
    flags: dict[str, tuple[str, ...]]

    def text(self, *names: str) -> str | None:
        """The first value of the first of these flags that is given."""
        return next((self.flags[name][0] for name in names if self.flags.get(name)), None)

    def number(self, name: str, default: int) -> int:
        """Raises ValueError where the flag's value is no whole number above 0."""
        value = self.text(name)
        if value is not None and int(value) < 1:
            raise ValueError(f"--{name} {value} is not above 0")
        return default if value is None else int(value)


def launch_of(command: Command) -> Launch | None:
    """None where the command trains nothing that is known here."""
    words = list(command.words)
    start = _start(words)
    if start is None:
        return None
    place, framework, kind = start
    flags = parsed_flags(words[place:])
    if flags.get("rlhf_type", ("grpo",))[0] != "grpo":
        return None
    return Launch(framework=framework, kind=kind, processes=_processes(words[:place], command.variables), flags=flags)


def _start(words: Sequence[str]) -> tuple[int, Framework, Kind] | None:
    """Where the flags begin, whose they are, and what they start."""
    for i, word in enumerate(words[:-1] if words else []):
        name, following = PurePath(word).name, words[i + 1]
        if name == "swift" and following in ("rlhf", "sft"):
            return i + 2, "ms-swift", "grpo" if following == "rlhf" else "sft"
        if name == "trl" and following in ("grpo", "sft"):
            return i + 2, "TRL", "grpo" if following == "grpo" else "sft"
        if name in ("rlhf.py", "sft.py") and "swift" in PurePath(word).parts:
            return i + 1, "ms-swift", "grpo" if name == "rlhf.py" else "sft"
        if name in VLM_R1_SCRIPTS:
            return i + 1, "VLM-R1", "grpo"
        if name.endswith(".py") and any(PurePath(before).name in LAUNCHERS for before in words[:i]):
            return i + 1, "TRL", "sft" if "sft" in name else "grpo"
    return None


def parsed_flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`--name value ...`, `--name=value`, `--name` (true); what stands before the first flag is left out."""
    flags: dict[str, tuple[str, ...]] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = (value,) if equals else ()
        elif name is not None and word not in (">", ">>", "2>&1", "&"):
            flags[name] = (*flags[name], word)
    return {name: values or ("true",) for name, values in flags.items()}


def _processes(launcher: Sequence[str], variables: dict[str, str]) -> int:
    """Of all machines; 1 where nothing says otherwise. Raises ValueError where that is no number."""
    flags = parsed_flags(launcher)
    if "num_processes" in flags:
        return int(flags["num_processes"][0])
    nodes = flags.get("nnodes", (variables.get("NNODES", "1"),))[0]
    each = flags.get("nproc_per_node", flags.get("num_gpus", (variables.get("NPROC_PER_NODE", "1"),)))[0]
    return int(nodes) * int(each)
