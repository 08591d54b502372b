"""What CUDA, Triton and Inductor say if a card, its driver or its compilers cannot run a program, and what to do.

The texts in card_faults.json are those of public reports. This module does not need torch, so that `doctor` can read
it."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tiercel.message_text import first_line


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFault:
    """A kind of failure, known by its text."""

    code: str
    pattern: re.Pattern[str]
    meaning: str
    remedy: str
    seen: str = ""  # issues with such a text


# The first that matches is taken. Inductor's "No valid triton configs" is followed by the reason, if there is one.
FAULTS = tuple(
    CardFault(**{**each, "pattern": re.compile(each["pattern"], re.IGNORECASE | re.DOTALL)})
    for each in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
)


def card_fault(text: str) -> CardFault | None:
    """Recognise the text of an error, or return None."""
    return next((fault for fault in FAULTS if fault.pattern.search(text)), None)


def plain_reason(error: Exception) -> str:
    """Return the meaning and the remedy of a known failure, or else the first line of its message."""
    fault = card_fault(str(error))
    return first_line(error) if fault is None else f"{fault.meaning}; {fault.remedy}"


def triton_errors() -> tuple[type[Exception], ...]:
    """Return the class of Triton's own errors, which are no RuntimeErrors, if Triton was imported."""
    module = sys.modules.get("triton.errors")
    return () if module is None else (module.TritonError,)
