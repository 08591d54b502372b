"""Processes of this machine and the control groups that limit them, as the system tells about them."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_PARENT_CHECK_SECONDS = 1.0


def boot_id() -> str:
    """Return what the kernel calls its start, which differs between machines. Raises OSError if it is not Linux."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def end_with_parent(parent: int, code: int = 1) -> None:
    """End this process with an exit code once its parent has ended, which a thread of its own watches from now on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(code)

    threading.Thread(target=watch, daemon=True).start()


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process; None if it is alone. One of RANK and WORLD_SIZE without the
    other is left over from something else."""
    return int(os.environ["RANK"]) if os.environ.get("RANK") and os.environ.get("WORLD_SIZE") else None


def usable_cores() -> int:
    """Count the cores that this process may use, which a scheduler may have limited."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def process_fields(process: int | str) -> list[str]:
    """Read the fields of /proc/PROCESS/stat from the state on: state, parent, ... Empty if the process has ended, or on
    a system without /proc."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def signal_name(number: int) -> str:
    """Return the name of a signal. Most real-time signals have only a number."""
    known = {each.value: each.name for each in signal.Signals}
    return known.get(number, f"signal {number}")


def control_groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """Yield this process's control group and all groups around it, for both versions of cgroups. `membership` is
    /proc/self/cgroup, and `root` is where the groups are mounted."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controller if controllers else root
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):  # in a container the path may be the host's, and only the top exists
            yield mount / group
