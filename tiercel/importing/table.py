"""The meaning of the peers' flags: tables in peers/ with one line for each flag."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal

from tiercel.config.schema import Kind

Framework = Literal["ms-swift", "TRL", "VLM-R1", "LLaMA-Factory"]
Method = Literal["grpo", "rloo", "sft", "dpo", "orpo", "simpo", "cpo", "kto", "rm", "gkd"]
KINDS: dict[Method, Kind] = {  # the recipe of each method
    "grpo": "grpo", "rloo": "grpo", "sft": "sft", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "cpo": "dpo",
    "kto": "kto", "rm": "reward", "gkd": "distill",
}  # fmt: skip
Treatment = Literal["set", "nearest", "together", "none", "nothing to do", "refused"]
_MARKS: dict[str, Treatment] = {"=": "together", "-": "none", "0": "nothing to do", "!": "refused"}

# The sources that the tables were made from.
VERSIONS: dict[Framework, str] = {
    "ms-swift": "4.6.0.dev0, commit 3602360",
    "TRL": "1.10.0.dev0, commit f2cd577",
    "VLM-R1": "commit 90052f4, with TRL 0.17",
    "LLaMA-Factory": "0.9.6.dev0, commit ff6d4d1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A flag, or a variable of the environment, of a peer."""

    name: str
    default: tuple[str, ...]  # its words; empty where the flag has no default
    treatment: Treatment
    key: str | None  # the key that takes the value, or is nearest
    meaning: str
    remark: str

    def told(self) -> str:
        """Return the note on a flag that sets no key."""
        tail = f": {self.remark}" if self.remark else ""
        match self.treatment:
            case "nearest":
                return f"{self.meaning}; nearest is {self.key}{tail}"
            case "none":
                return f"{self.meaning}; has no equivalent{tail}"
            case "nothing to do":
                return f"{self.meaning}{tail}"
            case "refused":
                return f"{self.meaning} is no method of this version; nearest: {self.remark}"
            case _:
                return f"{self.meaning}; nothing depends on it in this command"


@cache
def rows_of(framework: Framework, method: Method) -> Mapping[str, TableRow]:
    """Return every known flag by its name, with its meaning in one method."""
    ranks = {"": 1, method: 2, KINDS[method]: 2}  # an own row comes after a plain one, and that after those of others

    def rank(row: TableRow) -> int:
        return max(ranks.get(name, 0) for name in row.name.partition("@")[2].split(","))

    read = sorted(_read("transformers.txt") + _read(f"{framework.lower()}.txt"), key=rank)
    return {
        row.name.partition("@")[0]: row
        if rank(row)
        else replace(row, default=(), treatment="nothing to do", remark="another method reads it")
        for row in read
    }


@cache
def environment_rows() -> tuple[TableRow, ...]:
    """Return variables, some of them patterns such as NCCL_*, and flags of launchers as `launcher NAME`."""
    return _read("environment.txt")


def environment_row(name: str) -> TableRow | None:
    """Return the row of a variable, or of a launcher's flag; None where it is not known."""
    return next((row for row in environment_rows() if fnmatchcase(name, row.name)), None)


@cache
def _read(file: str) -> tuple[TableRow, ...]:
    text = (files("tiercel.importing.peers") / file).read_text(encoding="utf-8")
    return tuple(_row(line) for line in text.splitlines() if line and not line.startswith("#"))


def _row(line: str) -> TableRow:
    name, default, key, meaning, remark = (part.strip() for part in line.split("|"))
    treatment = _MARKS.get(key, "nearest" if key.startswith("~") else "set")
    return TableRow(
        name=name,
        default=tuple(default.split()),
        treatment=treatment,
        key=None if key in _MARKS else key.removeprefix("~"),
        meaning=meaning,
        remark=remark,
    )
