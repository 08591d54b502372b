"""What each rank of a run does now, from the files that the ranks write, and how the run stands."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tiercel.regular_files import read_json
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.ending import SILENT_SECONDS
from tiercel.web.report.listing import run_ending
from tiercel.web.report.numbers import NOTHING, duration
from tiercel.web.report.reading import RecordedRun
from tiercel.web.report.templates import drawn
from tiercel.web.report.verdict import progress

_LARGEST_SIGN = 1 << 20  # bytes
_ROWS_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSign:
    """The last sign of a rank."""

    rank: int
    doing: dict[str, Any]  # a Sign as JSON
    age_seconds: float

    @property
    def is_silent(self) -> bool:
        return self.age_seconds > SILENT_SECONDS

    @property
    def rows(self) -> str:
        """Return the first rows that it works on."""
        rows = list(map(str, given)) if isinstance(given := self.doing.get("rows"), list) else []
        return ", ".join(rows[:_ROWS_SHOWN]) + (", …" if len(rows) > _ROWS_SHOWN else "")

    def said(self, name: str) -> str:
        """Return a value of the sign in words."""
        value = self.doing.get(name)
        return NOTHING if value is None or value == "" else str(value)

    def seconds(self, name: str, more: float = 0.0) -> str:
        """Return a time of the sign, and the time since, in words."""
        value = self.doing.get(name)
        return duration(value + more) if isinstance(value, int | float) else NOTHING


def rank_signs(run: Path) -> list[RankSign]:
    """Read the ranks' signs; a file that is being removed or cannot be read is left out."""
    signs = []
    for file in (run / HEARTBEATS).glob("rank-*.json"):
        try:
            age = max(0.0, time.time() - file.stat().st_mtime)
            doing = redact_values(read_json(file, _LARGEST_SIGN))
            signs.append(RankSign(rank=int(doing["rank"]), doing=doing, age_seconds=age))
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return sorted(signs, key=lambda sign: sign.rank)


def state_of(run: RecordedRun) -> tuple[str, str]:
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


def ranks_part(run: RecordedRun) -> Markup:
    """Show what the ranks do, or how the run ended."""
    state, reason = state_of(run)
    return drawn("ranks.html", signs=rank_signs(run.path), state=state, reason=reason)


def status_part(run: RecordedRun) -> Markup:
    """Show in one line how the run stands."""
    state, why = state_of(run)
    seconds = [value for _, value in run.series("time/step")[-20:]]
    left = ""
    if state == "running" and run.total_steps and seconds:
        left = f", about {duration(sum(seconds) / len(seconds) * max(0, run.total_steps - run.last_step))} left"
    doing = f" ({why})" if state in ("running", "silent") else ""
    return drawn("status.html", run=run, state=state, doing=doing, progress=progress(run), left=left)
