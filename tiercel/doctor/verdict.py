"""The result of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "broken", "absent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one check. `broken`: a run that needs it will fail; `warning`: it may fail; `absent`: it is not
    there, and not always needed. `found` says what there is; `remedy` is empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""
