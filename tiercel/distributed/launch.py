"""`--nproc N`: this command again as N ranks, by torch's own elastic launcher.

A failed rank ends all of them, and with restarts left they start anew and go on from the newest checkpoint. What
would only fail again, a wrong recipe say, is not tried again: a rank notes its exit code in a file that the next
attempt reads, for the launcher itself knows none but its own.
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

from tiercel.distributed.deaths import describe_deaths, memory_kills
from tiercel.distributed.notes import NOTES, noted_code, told_file
from tiercel.distributed.oversight import Oversight
from tiercel.errors import EXIT_TRAINING, ElsewhereError, TiercelError, TrainingError


def launch(arguments: Sequence[str], processes: int, max_restarts: int, stall_timeout: float) -> None:
    """Run `python -m tiercel ARGUMENTS` as ranks on this machine. Raises ElsewhereError with the exit code of the rank
    that failed first, which has said why, and TrainingError where a rank was killed and could not."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A store that lives on after a restart still has the addresses of ranks that are gone.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
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
            signals_to_handle="SIGQUIT",  # the others are handed on below, once, and ranks take the time they need
        )
        kills = memory_kills()
        try:
            with _signals_handed_on(Path(notes)), Oversight(Path(notes), processes, stall_timeout) as oversight:
                elastic_launch(config, sys.executable)("-m", "tiercel", *arguments)
        except ChildFailedError as error:
            raise failure_of(oversight, error.failures, kills) from error
        finally:
            del os.environ[NOTES]


def failure_of(oversight: Oversight, failures: Mapping[int, Any], kills: Mapping[Path, int]) -> TiercelError:
    """What to tell of ranks that failed; `failures`: torch's, by rank; `kills`: the kernel's counts of kills for want
    of memory, before. One that ended without a word, by a signal say, is named, even if another has noted meanwhile
    that it lost it; one that the launcher ended is not."""
    notes = oversight.notes
    code = noted_code(notes)
    deaths = oversight.deaths(
        {
            rank: (failure.pid, int(failure.exitcode))
            for rank, failure in failures.items()
            if not told_file(notes, failure.pid).exists()
        }
    )
    has_told = len(deaths) < len(failures)
    if code in (None, EXIT_TRAINING) and not all(death.was_ended and has_told for death in deaths):
        return TrainingError(describe_deaths(deaths, kills, memory_kills()))
    return ElsewhereError(0, EXIT_TRAINING if code is None else code)


@contextmanager
def _signals_handed_on(notes: Path) -> Iterator[None]:
    """SIGTERM and SIGINT go to every rank, each time they come: the first saves and ends, the second ends. After one
    no attempt follows."""

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
    """End this process. A rank ends without taking the interpreter down: threads of gloo that still hold tensors ask
    for it then and abort the process ("terminate called without an active exception"), and the launcher would take that
    for a failure of a run whose files are all written. https://github.com/pytorch/pytorch/pull/179291"""
    if "RANK" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
