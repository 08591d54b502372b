"""The meaning of the peers' flags: tables in peers/ with one line for each flag."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Literal

Framework = Literal["ms-swift", "TRL", "VLM-R1"]
Method = Literal["grpo", "rloo", "sft"]
Treatment = Literal["set", "nearest", "together", "none", "nothing to do", "refused"]
_MARKS: dict[str, Treatment] = {"=": "together", "-": "none", "0": "nothing to do", "!": "refused"}

# The sources that the tables were made from.
VERSIONS: dict[Framework, str] = {
    "ms-swift": "4.6.0.dev0, commit 3602360",
    "TRL": "1.10.0.dev0, commit f2cd577",
    "VLM-R1": "commit 90052f4, with TRL 0.17",
}
_FILES: dict[Framework, str] = {"ms-swift": "ms-swift.txt", "TRL": "trl.txt", "VLM-R1": "vlm-r1.txt"}


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
    """Return every known flag by its name, with its meaning in one kind of training."""
    read = _read("transformers.txt") + _read(_FILES[framework])
    plain = {row.name: row for row in read if "@" not in row.name}
    own = {row.name.partition("@")[0]: row for row in read if row.name.endswith(f"@{method}")}
    return {**plain, **own}


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
