"""Parse what data.train, data.eval and data.mix may name: a file, a directory, or a data set of the hub, whole or in
part.

The forms are PATH, a pattern of several files (with *, ?, [..], and ** for folders), hf:ORGANISATION/NAME,
hf:ORGANISATION/NAME/CONFIG and hf:./FOLDER, the last three also with :SPLIT; URLs such as s3://BUCKET/rows/*.jsonl; and
any of these with #N. A list of them is read as one file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from os import PathLike
from os.path import exists, isdir

from tiercel.secret_names import PARAMETER, is_secret_parameter

HUB = "hf:"
HUB_FORM = "hf:ORGANISATION/NAME, with /CONFIG, :SPLIT and #N if needed"
DEFAULT_SPLIT = "train"

_COUNTED = re.compile(r"(?P<whole>.+)#(?P<count>\d+)", re.DOTALL)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?P<rest>.*)", re.DOTALL)
_PASSWORD = re.compile(r"[^/@]*:[^/@]*@")
_PART = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSource:
    """Where rows come from."""

    path: str  # a file, a directory or a pattern; for the hub, ORGANISATION/NAME or the folder of a downloaded copy
    config: str | None = None  # the config of a data set of the hub
    split: str | None = None  # the split of a data set of the hub; None for a file or directory
    url: str | None = None  # where the file lies of which `path` is a copy
    count: int | None = None  # use this number of its rows; None for all

    @property
    def is_hub(self) -> bool:
        return self.split is not None

    @property
    def is_remote(self) -> bool:
        """Return whether the path is a URL, whose files must be copied before they are read."""
        return not self.is_hub and _URL.match(self.path) is not None

    @property
    def files(self) -> tuple[str, ...]:
        """Return the files or the directory: what a pattern matches, sorted by name, else the path itself."""
        if self.is_hub or self.is_remote or exists(self.path) or not has_magic(self.path):
            return (self.path,)
        return tuple(sorted(glob(self.path, recursive=True)))

    @property
    def name(self) -> str:
        """Return the name that messages and rows use. It leaves out the count, because the rows are those of the whole
        source."""
        if not self.is_hub:
            return self.url or self.path
        return f"{HUB}{self.path}{f'/{self.config}' if self.config else ''}:{self.split}"


def names_in(given: str | PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """Return what data.train or data.eval names: the entries of a list, else the one name."""
    return tuple(map(str, given)) if isinstance(given, list | tuple) else (str(given),)


def row_source(given: str) -> RowSource:
    """Parse the source that a recipe names. Raises ValueError with the fault and what to write instead."""
    if exists(given):  # the name of a real file may contain #N
        return RowSource(path=given)
    match = _COUNTED.fullmatch(given)
    whole, count = (match["whole"], int(match["count"])) if match else (given, None)
    if count == 0:
        raise ValueError(f"#0 selects no rows; use a number above 0, or {whole} for all rows")
    if (url := _URL.match(whole)) is not None:
        _require_plain(whole, url["rest"])
        return RowSource(path=whole, count=count)
    if not whole.startswith(HUB):
        return RowSource(path=whole, count=count)
    path, _, split = whole.removeprefix(HUB).partition(":")
    if "#" in split:
        raise ValueError(f"{split.partition('#')[2]!r} after # is not a number of rows")
    path, config = (path, None) if _is_folder(path) else _name_and_config(path)
    return RowSource(path=path, config=config, split=split or DEFAULT_SPLIT, count=count)


def _require_plain(url: str, rest: str) -> None:
    if "::" in rest:
        raise ValueError("several URLs are chained with ::; name one")
    if _PASSWORD.match(rest) or any(is_secret_parameter(each["name"]) for each in PARAMETER.finditer(url)):
        raise ValueError(
            "has a password, key or signature in it; set it where the store's own package looks for it, such as in an "
            "environment variable"
        )


def _is_folder(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or isdir(path)


def _name_and_config(path: str) -> tuple[str, str | None]:
    parts = path.split("/")
    if not 2 <= len(parts) <= 3 or not all(_PART.fullmatch(part) for part in parts):
        raise ValueError(f"this does not name a data set of the hub; use {HUB_FORM}")
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
