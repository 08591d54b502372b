"""Describe ranks that ended without a message: which ended first, by which signal, and the probable cause."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiercel.distributed.rank_status_files import FINAL_FAULTS
from tiercel.processes import control_groups, signal_name
from tiercel.reliability.stall import innermost_frames
from tiercel.tables import table_rows

RESUMED = "Run the same command again to resume from the newest checkpoint; --max-restarts does this automatically"
OOM_REMEDY = "lower data.workers or --nproc"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """Describes a rank that ended without a message. `code` is its exit code, or minus its signal. `was_ended` means
    that the launcher ended it because another rank had ended. `stack` is what the rank wrote when the signal came."""

    rank: int
    code: int
    was_ended: bool = False
    stack: str = ""


def describe_rank_exits(
    exits: Sequence[RankExit], kills_before: Mapping[Path, int], kills_now: Mapping[Path, int]
) -> str:
    """Return the message. `kills_before` and `kills_now` are the numbers of processes that the kernel has killed
    because memory ran out, by file."""
    fell = [rank_exit for rank_exit in exits if not rank_exit.was_ended] or list(exits)
    numbers = {-rank_exit.code for rank_exit in fell}
    parts = [f"{_end_of(rank_exit)}{_why(rank_exit, kills_before, kills_now)}" for rank_exit in fell]
    ended = [f"rank {rank_exit.rank}" for rank_exit in exits if rank_exit not in fell]
    lines = ["; ".join(parts)]
    for rank_exit in fell:
        if frames := innermost_frames(_of_the_signal(rank_exit.stack)):
            lines += [f"  rank {rank_exit.rank} was at", *(f"    {frame}" for frame in frames)]
    if ended:
        lines.append(f"tiercel then ended {', '.join(ended)}")
    final = [each.name for each in FINAL_FAULTS.values() if each in numbers]
    lines.append(f"{' and '.join(final)} would happen again, so no further attempt is made" if final else RESUMED)
    return "\n".join(lines)


def _of_the_signal(stack: str) -> str:
    """Return the stack of the thread that got the signal, if it is a Python thread; otherwise the whole text."""
    head, mark, tail = stack.partition("Current thread")
    return mark + tail.partition("\n\n")[0] if mark else head


def _end_of(rank_exit: RankExit) -> str:
    if rank_exit.code >= 0:
        return f"rank {rank_exit.rank} ended with exit code {rank_exit.code}"
    return f"rank {rank_exit.rank} was killed by {signal_name(-rank_exit.code)}"


def _why(rank_exit: RankExit, before: Mapping[Path, int], now: Mapping[Path, int]) -> str:
    if rank_exit.code == -signal.SIGKILL:
        return f": {memory_verdict(before, now)}"
    causes = dict(table_rows("tiercel.distributed", "causes.txt"))
    cause = causes.get(signal_name(-rank_exit.code)) if rank_exit.code < 0 else None
    return f": {cause}" if cause else ""


def memory_verdict(before: Mapping[Path, int], now: Mapping[Path, int]) -> str:
    """Decide from the kernel's own counts whether it has killed processes in the meantime because memory ran out, and
    say so."""
    for file, count in now.items():
        if count > before.get(file, count):
            return (
                f"the kernel killed it for lack of memory (oom_kill in {file} went from {before[file]} to {count}); "
                f"{OOM_REMEDY}"
            )
    if not now:
        return f"this usually means that memory ran out; {OOM_REMEDY}"
    files = ", ".join(map(str, now))
    return (
        f"the kernel did not kill it for lack of memory (oom_kill in {files} did not change): another process sent "
        "the signal, such as a scheduler enforcing its limit or a `kill -9`"
    )


def memory_kills(root: Path = Path("/")) -> dict[Path, int]:
    """Read how many processes the kernel has killed because memory ran out, by file: in this process's cgroup, of
    version 1 or 2, in those around it, and on the machine. Empty if no count can be read."""
    groups = control_groups("memory", root / "sys/fs/cgroup", root / "proc/self/cgroup")
    of_groups = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    files = [*of_groups, root / "proc/vmstat"]
    return {file: count for file in files if (count := _oom_kills(file)) is not None}


def _oom_kills(file: Path) -> int | None:
    try:
        fields = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
        return int(fields["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
