"""Reading what the page asks for from the parameters of its address. What makes no sense is refused with the reason."""

import math
import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException

from tiercel.view.choosing import ORDERS, Wanted
from tiercel.view.groups import FOLDERS

_STEPS = re.compile(r"\s*([0-9]{1,12})\s*(?:-\s*([0-9]{1,12})?\s*)?")
_LONGEST = 500  # characters of a text


def wanted_of(given: Mapping[str, str]) -> Wanted:
    """Read the filters. Raises HTTPException, whose text is for the reader of the page."""
    folder, order = given.get("folder") or "rollouts", given.get("order") or "newest"
    known = {name: name for name in FOLDERS}
    if folder not in known or order not in ORDERS:
        raise HTTPException(400, "There is no such kind of rows or order.")
    return Wanted(
        folder=known[folder],
        order=order,
        measure=given.get("measure") or "mean",
        low=_number(given, "low"),
        high=_number(given, "high"),
        row=given.get("row", "").strip(),
        steps=_steps(given.get("steps", "")),
        text=given.get("text", "").strip()[:_LONGEST],
    )


def after_of(given: Mapping[str, str]) -> tuple[int, int] | None:
    """Read the step and the place of the last group that the page has."""
    match = re.fullmatch(r"([0-9]{1,12})\.([0-9]{1,12})", given.get("after", ""))
    return (int(match[1]), int(match[2])) if match else None


def _number(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "").strip().replace("\u2212", "-")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise HTTPException(400, f"{text} is no number: write a limit of the reward such as 0.5.")
    return value


def _steps(text: str) -> tuple[int, int] | None:
    if not text.strip():
        return None
    match = _STEPS.fullmatch(text)
    if match is None:
        raise HTTPException(400, f"{text} is no step: write one such as 120, or several such as 100-200 or 100-.")
    last = int(match[2]) if match[2] else (10**12 if "-" in text else int(match[1]))
    return int(match[1]), last
