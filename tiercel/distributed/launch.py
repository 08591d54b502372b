"""`--nproc N`: this command again as N ranks, by torch's own elastic launcher.

A failed rank ends all of them, and with restarts left they start anew and go on from the newest checkpoint. What
would only fail again, a wrong recipe say, is not tried again: a rank notes its exit code in a file that the next
attempt reads, for the launcher itself knows none but its own.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NoReturn

from tiercel.errors import EXIT_TERMINATED, EXIT_TRAINING, EXIT_USER, ElsewhereError, TiercelError, TrainingError

NOTES = "TIERCEL_LAUNCH_NOTES"  # directory of the notes; set for ranks that this module started
FINAL_CODES = (EXIT_USER, EXIT_TERMINATED)  # starting again would end in the same way
PARENT_CHECK_SECONDS = 1.0


def launch(arguments: Sequence[str], processes: int, max_restarts: int) -> None:
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
        try:
            with _signals_handed_on(Path(notes)):
                elastic_launch(config, sys.executable)("-m", "tiercel", *arguments)
        except ChildFailedError as error:
            raise failure_of(Path(notes), error.failures) from error
        finally:
            del os.environ[NOTES]


def failure_of(notes: Path, failures: Mapping[int, Any]) -> TiercelError:
    """What to tell of ranks that failed; `failures`: torch's, by rank. One that ended without a word, by a signal say,
    is named, though another has noted meanwhile that it lost it."""
    code = _noted_code(notes)
    silent = {rank: failure for rank, failure in failures.items() if not _told(notes, failure.pid).exists()}
    if silent and code in (None, EXIT_TRAINING):
        return TrainingError(_unsaid(silent))
    return ElsewhereError(0, EXIT_TRAINING if code is None else code)


def start_notes() -> int | None:
    """A rank's first act: its process id for the launcher. An exit code where an earlier attempt found that nothing
    would be won by another."""
    if NOTES not in os.environ:
        return None
    notes = Path(os.environ[NOTES])
    (notes / f"{os.getpid()}.pid").touch()
    code = _noted_code(notes)
    if code in FINAL_CODES:
        return code
    (notes / "code").unlink(missing_ok=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    return None


def note_code(code: int) -> None:
    """Note why this rank ends, unless another one was first; and that it has said so itself."""
    if NOTES in os.environ:
        with suppress(OSError):
            _told(Path(os.environ[NOTES]), os.getpid()).touch()
        with suppress(OSError), (Path(os.environ[NOTES]) / "code").open("x", encoding="utf-8") as file:
            file.write(str(code))


def _told(notes: Path, process: int) -> Path:
    """There where a rank has said why it ends."""
    return notes / f"{process}.told"


def _noted_code(notes: Path) -> int | None:
    if (notes / "stopped").exists():
        return EXIT_TERMINATED
    with suppress(FileNotFoundError, ValueError):
        return int((notes / "code").read_text(encoding="utf-8"))
    return None


def _unsaid(failures: Mapping[int, Any]) -> str:
    """What the launcher knows of ranks that ended without a word."""
    ends = []
    for rank, failure in sorted(failures.items()):
        code = int(failure.exitcode)
        if code >= 0:
            ends.append(f"rank {rank} ended with exit code {code}")
            continue
        name = signal.Signals(-code).name
        why = "; mostly the system short of memory: lower data.workers or --nproc" if name == "SIGKILL" else ""
        ends.append(f"rank {rank} was killed by {name}{why}")
    return "; ".join(ends) + ". The same command goes on from the newest checkpoint; --max-restarts does so by itself"


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


def _end_with_parent(parent: int) -> None:
    """Ranks have sessions of their own, so a killed launcher would leave them."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(EXIT_TRAINING)


def leave(code: int) -> NoReturn:
    """End this process. A rank ends without taking the interpreter down: threads of gloo that still hold tensors ask
    for it then and abort the process ("terminate called without an active exception"), and the launcher would take that
    for a failure of a run whose files are all written. https://github.com/pytorch/pytorch/pull/179291"""
    if "RANK" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
