"""Decides from the ranks' last statuses whether the run makes no progress, and which rank is the cause."""

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from tiercel.tables import table_rows

COMMUNICATION = ("torch/distributed/", "deepspeed/comm/")  # files whose functions wait for other ranks
FRAMES_SHOWN = 4
STATES = {letter: meaning for letter, meaning in table_rows("tiercel.reliability", "process_states.txt")}
AT_WORK = ("R", "D")  # such a process may block the interpreter for a while, for example to load a library
PATIENCE_AT_WORK = 3  # how many times longer such a process may be silent
PACKAGE = str(Path(__file__).parent.parent)
START = ("launch", "import", "join", "agree", "download", "rows")  # phases before the first step


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """The last report of a rank about itself."""

    rank: int
    host: str = ""
    process: int = 0
    phase: str = "launch"
    phases: int = 0  # started so far
    step: int = 0
    rows: tuple[str, ...] = ()
    waits_in: str | None = None  # a collective and its place in the code
    path: tuple[tuple[str, int], ...] = ()  # file and line of each call on the stack, outermost first
    quiet_seconds: float = 0.0  # since the last progress
    limit_seconds: float
    is_inside: bool = True  # if it waits in a collective: whether its innermost call is torch's
    looks: int = 0  # grows for as long as the watchdog's thread runs
    has_stacks: bool = False  # whether it has written its stacks, after a stall
    is_silent: bool = False
    is_gone: bool = False  # silent for longer than any rank is allowed to be
    state: str = ""  # of a silent rank's process, as /proc's letter, if a rank on the same machine could read it

    @property
    def position(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Return how far the rank is in the program, which is the same on all ranks. Positions can be compared."""
        return self.phases, self.path

    @property
    def is_over(self) -> bool:
        return self.quiet_seconds >= self.limit_seconds

    @property
    def place(self) -> str:
        rows = f", rows {', '.join(self.rows)}" if self.rows else ""
        return f"phase {self.phase} of {'the start' if self.phase in START else f'step {self.step}'}{rows}"

    def silent_for(self, seconds: float, limit: float, state: str) -> "RankStatus":
        """Return the status as it counts after `seconds` without a new one. Beyond the limit the rank is gone."""
        limit *= PATIENCE_AT_WORK if state in AT_WORK else 1
        silent = replace(self, is_silent=True, quiet_seconds=self.quiet_seconds + seconds, state=state)
        return replace(silent, is_gone=True, limit_seconds=limit) if seconds >= limit else silent


def is_stalled(rank: int, statuses: Sequence[RankStatus]) -> bool:
    """Return whether this rank should end the run: it has worked by itself beyond its limit; or it has waited beyond
    its limit and no other rank makes progress; or another rank is gone."""
    own = statuses[rank]
    if any(status.is_gone for status in statuses):
        return True
    if not own.is_over:
        return False
    return own.waits_in is None or all(status.is_over or status.is_silent for status in statuses)


def culprits(statuses: Sequence[RankStatus]) -> tuple[RankStatus, ...]:
    """Return the ranks that hold up the others. The first rule that applies decides:

    1. ranks that no longer give a status, unless they were last waiting while another rank works beyond its limit;
    2. ranks that make no progress in a phase before the first step, if not all do so;
    3. ranks that wait for nobody, if others wait or there is only one rank;
    4. if all are in the same place: ranks whose innermost call is not one of torch's, if that of others is;
    5. ranks that are in another place than most;
    6. if no place has most of the ranks: those that are further than the last one, because they skipped a collective.
       If all seem to work, as on GPUs, where the device itself waits: those that are behind.
    """
    silent = [status for status in statuses if status.is_silent]
    is_stuck = any(status.waits_in is None and status.is_over and not status.is_silent for status in statuses)
    if silent and not (is_stuck and all(status.waits_in is not None for status in silent)):
        return tuple(silent)
    working = [status for status in statuses if status.waits_in is None]
    starting = tuple(status for status in working if status.is_over and status.phase in START)
    if 0 < len(starting) < len(statuses):
        return starting
    if working and (len(working) < len(statuses) or len(statuses) == 1):
        return tuple(working)
    common, count = Counter(status.position for status in statuses).most_common(1)[0]
    if count == len(statuses):
        outside = tuple(status for status in statuses if not status.is_inside)
        return outside if len(outside) < len(statuses) else ()
    if 2 * count > len(statuses):
        return tuple(status for status in statuses if status.position != common)
    first = min(status.position for status in statuses)
    return tuple(status for status in statuses if (status.position == first) == bool(working))


def stall_message(statuses: Sequence[RankStatus], stacks: Mapping[int, str], directory: Path) -> str:
    """Write the message: which rank is at fault, what it is doing, where the others wait, where the stacks are, and
    what to do."""
    guilty = culprits(statuses)
    if not guilty and len(statuses) > 1:
        return "\n".join([_everyone_waits(statuses), *_advice(stacks, directory)])
    longest = max([status for status in guilty if status.is_over] or statuses, key=lambda status: status.quiet_seconds)
    lines = [
        f"stalled: no progress for {longest.quiet_seconds:.0f} s (the limit is {longest.limit_seconds:g} s, from "
        "reliability.stall_timeout)"
    ]
    lines += [_line(status, len(statuses)) for status in guilty]
    for status in guilty:
        if frames := innermost_frames(stacks.get(status.rank, "")):
            lines += [f"  rank {status.rank} is at", *(f"    {frame}" for frame in frames)]
    others: dict[tuple[str, str], list[int]] = {}
    for status in statuses:
        if status not in guilty:
            verb, place = ("wait", f"{status.waits_in}, ") if status.waits_in is not None else ("work", "")
            others.setdefault((verb, place + replace(status, rows=()).place), []).append(status.rank)
    for (verb, place), ranks in others.items():
        named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        lines.append(f"  rank{'s' if len(ranks) > 1 else ''} {named} {verb}{'' if len(ranks) > 1 else 's'} in {place}")
    return "\n".join([*lines, *_advice(stacks, directory)])


def _everyone_waits(statuses: Sequence[RankStatus]) -> str:
    status = max(statuses, key=lambda status: status.quiet_seconds)
    return (
        f"stalled: for {status.quiet_seconds:.0f} s all ranks have waited in the same place, "
        f"{status.waits_in or 'on their devices'}, {replace(status, rows=()).place}: the network between them, or a "
        "device, does not respond"
    )


def _advice(stacks: Mapping[int, str], directory: Path) -> list[str]:
    return [
        *([f"stacks of all ranks and threads: {directory}"] if stacks else []),
        "run the same command again to resume from the newest checkpoint; if that phase is only slow, raise "
        "reliability.stall_timeout",
    ]


def _line(status: RankStatus, world_size: int) -> str:
    where = f" ({status.host}, process {status.process})" if status.host else ""
    if status.is_silent:
        state = STATES.get(status.state) or "it ended, was stopped, or is in code that holds the interpreter"
        return (
            f"  rank {status.rank}{where} gives no sign of life: {state}; "
            f"it was last in {status.place}{_meaning(status)}"
        )
    if status.waits_in is not None and not status.is_inside:
        entered = f"has entered {status.waits_in}, but is in other code there, {status.place}"
        return f"  rank {status.rank}{where} {entered}; the others wait for it"
    if status.waits_in is not None:
        return (
            f"  rank {status.rank}{where} is in a different collective from the others: {status.waits_in}, "
            f"{status.place}"
        )
    holding = "; the others wait for it" if world_size > 1 else ""
    return f"  rank {status.rank}{where} is in {status.place}{_meaning(status)}{holding}"


def _meaning(status: RankStatus) -> str:
    return ", before tiercel's own first line" if status.phase == "launch" else ""


def innermost_frames(stack: str) -> list[str]:
    """Return the innermost frames of the rank's main thread, which is the last in the file."""
    blocks = [block for block in stack.split("\n\n") if "most recent call first" in block]
    frames = [line.strip() for line in blocks[-1].splitlines()[1:]] if blocks else []
    return [frame for frame in frames if frame.startswith("File ")][:FRAMES_SHOWN]


def waiting_place(frame: FrameType | None) -> str | None:
    """Return the name and the caller of the function of torch.distributed or DeepSpeed that a thread is in, mostly to
    wait for other ranks. Returns None if the thread is in other code."""
    if frame is None or not _communicates(frame):
        return None
    name = frame.f_code.co_name
    while frame is not None and _communicates(frame):
        frame = frame.f_back
    return f"{name} ({code_place(frame)})"


def code_place(frame: FrameType | None) -> str:
    """Return the file and the line without the directories above the package."""
    if frame is None:
        return "unknown"
    file = frame.f_code.co_filename.replace("\\", "/")
    return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"


def code_path(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    """Return the files and lines of this package on the way to a frame, outermost first."""
    frames = [] if frame is None else traceback.walk_stack(frame)
    places = [(each.f_code.co_filename, line) for each, line in frames]
    return tuple((file.removeprefix(PACKAGE), line) for file, line in reversed(places) if file.startswith(PACKAGE))


def is_inside_torch(frame: FrameType | None) -> bool:
    """Return whether the frame is in torch or DeepSpeed, whose code waits for the others in a collective."""
    return frame is not None and any(part in frame.f_code.co_filename for part in ("/torch/", "/deepspeed/"))


def _communicates(frame: FrameType) -> bool:
    file = frame.f_code.co_filename.replace("\\", "/")
    return any(part in file for part in COMMUNICATION)
