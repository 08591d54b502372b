"""What a look at one thing found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "broken", "absent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`broken` ends a run that needs it, a `warning` may, and what is `absent` need not be there. `found` is what is
    there; `remedy` is empty where nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""
