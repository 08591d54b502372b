"""What each rank of a run does now, from the files that the ranks write, and how the run stands."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.regular_files import read_text
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.ending import SILENT_SECONDS
from tiercel.web.report.cards import clipped, text_block
from tiercel.web.report.listing import run_ending
from tiercel.web.report.markup import Html, aside, element, side_head, table
from tiercel.web.report.numbers import NOTHING, duration
from tiercel.web.report.reading import Run

_LARGEST_SIGN = 1 << 20  # bytes
_ROWS_SHOWN = 4
_REASON = 600  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSign:
    """The last sign of a rank."""

    rank: int
    doing: dict[str, Any]  # a Sign as JSON
    age_seconds: float

    @property
    def is_silent(self) -> bool:
        return self.age_seconds > SILENT_SECONDS


def rank_signs(run: Path) -> list[RankSign]:
    """Read the ranks' signs; a file that is being removed or cannot be read is left out."""
    signs = []
    for file in (run / HEARTBEATS).glob("rank-*.json"):
        try:
            age = max(0.0, time.time() - file.stat().st_mtime)
            doing = redact_values(json.loads(read_text(file, _LARGEST_SIGN)))
            signs.append(RankSign(rank=int(doing["rank"]), doing=doing, age_seconds=age))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return sorted(signs, key=lambda sign: sign.rank)


def state_of(run: Run) -> tuple[str, str]:
    """Return the state of a run in a word, for a class of the style sheet as well, and why it is so."""
    try:
        ending = run_ending(run)
    except OSError as error:
        return "unknown", str(error)
    if ending.state != "running":
        return ending.state, redact(ending.reason)
    signs = rank_signs(run.path)
    if signs and all(sign.is_silent for sign in signs):
        return "silent", f"no sign of a rank for {duration(min(sign.age_seconds for sign in signs))}"
    return "running", ", ".join(dict.fromkeys(str(sign.doing.get("phase")) for sign in signs))


def ranks_block(run: Run) -> Html:
    """Show a table of the ranks, or how the run ended."""
    signs, (state, reason) = rank_signs(run.path), state_of(run)
    if not signs or state not in ("running", "silent"):
        said = text_block(clipped(reason, _REASON)) if reason else None
        return element("div", element("p", "No rank is at work. State: ", element("b", state)), said)
    heads = ("rank", "phase", "step", "since progress", "limit", "waits in", "rows", "process")
    note = "Each rank writes what it does every two seconds. A stall is found by the ranks themselves, at the limit."
    return element("div", table(map(_row, signs), heads, "plain ranks"), aside(note))


def _row(sign: RankSign) -> Html:
    doing = sign.doing
    quiet = _seconds(doing.get("quiet_seconds"), sign.age_seconds)
    rows = list(map(str, given)) if isinstance(given := doing.get("rows"), list) else []
    shown = ", ".join(rows[:_ROWS_SHOWN]) + (", …" if len(rows) > _ROWS_SHOWN else "")
    where = f"{doing.get('process') or NOTHING} on {doing.get('host') or 'an unknown host'}"
    silent = f"silent for {duration(sign.age_seconds)}" if sign.is_silent else None
    cells = (
        side_head(element("i", class_=f"pulse {'silent' if sign.is_silent else 'running'}"), f" {sign.rank}"),
        element("td", str(doing.get("phase", NOTHING)), element("b", silent, class_="bad block") if silent else None),
        str(doing.get("step", NOTHING)),
        quiet,
        _seconds(doing.get("limit_seconds")),
        str(doing.get("waits_in") or NOTHING),
        clipped(shown, 200) or NOTHING,
        where,
    )
    return element("tr", [cell if isinstance(cell, Html) else element("td", cell) for cell in cells])


def _seconds(value: Any, more: float = 0.0) -> str:
    return duration(value + more) if isinstance(value, int | float) else NOTHING
