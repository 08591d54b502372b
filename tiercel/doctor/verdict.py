"""The result of one check, and the texts that checks share."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Status = Literal["ok", "warning", "broken", "absent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one check. `broken`: a run that needs it will fail; `warning`: it may fail; `absent`: it is not
    there, and not always needed. `found` says what there is; `remedy` is empty if nothing is to be done."""

    name: str
    status: Status
    found: str
    remedy: str = ""


@cache
def texts(name: str) -> Any:
    """Read one of the doctor's tables: advice.json, or pairs.json."""
    return json.loads((files("tiercel.doctor") / f"{name}.json").read_text(encoding="utf-8"))
