"""Read the meaning of the peers' flags: tables in peers/ with one line for each flag."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from tiercel.config.schema import Kind
from tiercel.tables import table_rows

PEERS = "tiercel.convert.peers"  # the package of the tables
Framework = Literal["ms-swift", "TRL", "VLM-R1", "LLaMA-Factory", "EasyR1", "verl"]
OVERRIDING: tuple[Framework, ...] = ("EasyR1", "verl")  # their settings are words KEY=VALUE
Method = Literal["grpo", "rloo", "sft", "dpo", "orpo", "simpo", "cpo", "kto", "rm", "gkd", "distillation"]
KINDS: dict[Method, Kind] = {  # the recipe of each method
    "grpo": "grpo", "rloo": "grpo", "sft": "sft", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "cpo": "dpo",
    "kto": "kto", "rm": "reward", "gkd": "distill", "distillation": "distill",
}  # fmt: skip
Treatment = Literal["set", "nearest", "together", "none", "nothing to do", "refused"]
_MARKS: dict[str, Treatment] = {"~": "nearest", "=": "together", "-": "none", "0": "nothing to do", "!": "refused"}

# The note on a flag that sets no key.
_TOLD: dict[Treatment, str] = {
    "nearest": "{row.meaning}; nearest is {row.key}{tail}",
    "none": "{row.meaning}; has no equivalent{tail}",
    "nothing to do": "{row.meaning}{tail}",
    "refused": "{row.meaning} is not a method of this version; nearest: {row.remark}",
    **dict.fromkeys(("set", "together"), "{row.meaning}; nothing depends on it in this command"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A flag, or an environment variable, of a peer."""

    name: str
    default: tuple[str, ...]  # its words; empty if the flag has no default
    treatment: Treatment
    key: str | None  # the key that takes the value, or is nearest; of `together` also a name that functions ask by
    meaning: str
    remark: str

    def told(self) -> str:
        """Return the note on a flag that sets no key. The remark of one that decides with others is the whole note."""
        if self.treatment == "together" and self.remark:
            return self.remark
        tail = f": {self.remark}" if self.remark else ""
        return _TOLD[self.treatment].format(row=self, tail=tail)


@cache
def rows_of(framework: Framework, method: Method) -> Mapping[str, TableRow]:
    """Return every known flag by its name, with its meaning in one method."""
    # A row for the method itself overrides a general row, which overrides rows for other methods.
    ranks = {"": 1, method: 2, KINDS[method]: 2}

    def rank(row: TableRow) -> int:
        return max(ranks.get(name, 0) for name in row.name.partition("@")[2].split(","))

    shared = () if framework in OVERRIDING else _read("transformers.txt")
    read = sorted(shared + _read(f"{framework.lower()}.txt"), key=rank)
    return {
        row.name.partition("@")[0]: row
        if rank(row)
        else replace(row, default=(), treatment="nothing to do", remark="another method reads it")
        for row in read
    }


@cache
def environment_rows() -> tuple[TableRow, ...]:
    """Return the rows of variables, some of which are patterns such as NCCL_*, and of launchers' flags as `launcher
    NAME`."""
    return _read("environment.txt")


def environment_row(name: str) -> TableRow | None:
    """Return the row of a variable, or of a launcher's flag; None if it is not known."""
    return next((row for row in environment_rows() if fnmatchcase(name, row.name)), None)


def versions() -> dict[str, str]:
    """Read the versions of the peers that the tables were made from."""
    return {peer: version for peer, version in table_rows(PEERS, "versions.txt")}


@cache
def words_of(flag: str) -> Mapping[str, str]:
    """Return the words of keys by those that a flag takes, where the table of words has the flag."""
    lines = [(given, word) for name, given, word in table_rows(PEERS, "words.txt") if name == flag]
    return {name: word for given, word in lines for name in given.split(", ")}


@cache
def _read(file: str) -> tuple[TableRow, ...]:
    rows = []
    for name, default, key, meaning, remark in table_rows(PEERS, file):
        treatment = _MARKS.get(key[:1], "set")
        own = key.lstrip("".join(_MARKS)) or None
        words = tuple(default.split())
        rows.append(TableRow(name=name, default=words, treatment=treatment, key=own, meaning=meaning, remark=remark))
    return tuple(rows)
