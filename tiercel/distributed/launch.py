"""Run a command with `--nproc N` as N ranks, with torch's elastic launcher.

A failed rank ends all ranks. If restarts are left, the ranks start again and continue from the newest checkpoint. A
failure that would happen again, such as a wrong recipe, is not retried: the rank writes its exit code into a file,
which the ranks of the next attempt read, because the launcher does not pass it on.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

from tiercel.distributed.exit_diagnosis import describe_rank_exits, memory_kills
from tiercel.distributed.rank_monitor import RankMonitor
from tiercel.distributed.rank_status_files import NOTES, noted_code, told_file
from tiercel.errors import EXIT_TRAINING, ElsewhereError, TiercelError, TrainingError
from tiercel.processes import launched_rank, usable_cores


def launch(arguments: Sequence[str], processes: int, max_restarts: int, stall_timeout: float) -> None:
    """Run `python -m tiercel ARGUMENTS` as ranks on this machine. Raises ElsewhereError with the exit code of the rank
    that failed first and has printed why, and TrainingError if a rank was killed and could not print it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A shared store would keep the addresses of ended ranks after a restart.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    with TemporaryDirectory(prefix="tiercel-") as notes:
        os.environ[NOTES] = notes
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"tiercel-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
            signals_to_handle="SIGQUIT",  # the others are passed on below, so that ranks have time to save
        )
        kills = memory_kills()
        try:
            with _signals_handed_on(Path(notes)), RankMonitor(Path(notes), processes, stall_timeout) as monitor:
                elastic_launch(config, sys.executable)("-m", "tiercel", *arguments)
        except ChildFailedError as error:
            raise failure_of(monitor, error.failures, kills) from error
        finally:
            del os.environ[NOTES]


def failure_of(monitor: RankMonitor, failures: Mapping[int, Any], kills: Mapping[Path, int]) -> TiercelError:
    """Make the error for ranks that failed. `failures` are those of torch, by rank; `kills` are the counts of
    `memory_kills` before the start. A rank that ended without a message, by a signal for example, is named, even if
    another rank has noted an error about it. A rank that the launcher ended is not named."""
    notes = monitor.notes
    code = noted_code(notes)
    exits = monitor.exits(
        {
            rank: (failure.pid, int(failure.exitcode))
            for rank, failure in failures.items()
            if not told_file(notes, failure.pid).exists()
        }
    )
    has_told = len(exits) < len(failures)
    if code in (None, EXIT_TRAINING) and not all(rank_exit.was_ended and has_told for rank_exit in exits):
        return TrainingError(describe_rank_exits(exits, kills, memory_kills()))
    return ElsewhereError(0, EXIT_TRAINING if code is None else code)


@contextmanager
def _signals_handed_on(notes: Path) -> Iterator[None]:
    """Pass SIGTERM and SIGINT on to every rank, each time they come: at the first a rank saves and ends, at the second
    it ends at once. After such a signal there is no further attempt."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        (notes / "stopped").touch()
        for file in notes.glob("*.pid"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(file.stem), number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End this process. A rank ends without shutting down the interpreter: otherwise gloo's threads that still have
    tensors would use it and abort the process ("terminate called without an active exception"). The launcher would take
    that for a failure, although all files of the run are written. https://github.com/pytorch/pytorch/pull/179291"""
    if launched_rank() is None:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
