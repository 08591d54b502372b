"""Write notes of a rank for the launcher of `--nproc`, in a directory of the launcher: process ids, why ranks end, what
they do. This file imports nothing heavy, because it is the first that a rank uses."""

import faulthandler
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tiercel.errors import EXIT_STALL, EXIT_TAKEN, EXIT_TERMINATED, EXIT_TRAINING, EXIT_USER
from tiercel.processes import end_with_parent, launched_rank
from tiercel.reliability.stall_files import CALL

NOTES = "TIERCEL_LAUNCH_NOTES"  # the directory; set for ranks that tiercel's own launcher started
FINAL_CODES = (EXIT_USER, EXIT_TAKEN, EXIT_TERMINATED)  # another attempt would end in the same way
FINAL_FAULTS = {
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}  # by their names in faulthandler
SIGNS = "signs"
STALLED = f"{SIGNS}/{CALL}"


def start_notes() -> int | None:
    """Write the process id and the rank for the launcher, and open a file for the stack of a signal that ends this
    rank. Return an exit code if an earlier attempt has found that another one would fail too, and otherwise None."""
    if NOTES not in os.environ:
        if launched_rank() is not None:
            faulthandler.enable()
        return None
    notes = Path(os.environ[NOTES])
    if (code := final_code(notes)) is not None:
        return code
    (notes / f"{os.getpid()}.pid").write_text(os.environ["RANK"], encoding="utf-8")
    faulthandler.enable(stack_file(notes, os.getpid()).open("w", encoding="utf-8"))
    for file in (notes / "code", notes / STALLED):  # of an earlier attempt
        file.unlink(missing_ok=True)
    # Ranks have their own sessions, so they would outlive a killed launcher.
    end_with_parent(os.getppid(), EXIT_TRAINING)
    return None


def note_code(code: int) -> None:
    """Write why this rank ends, unless another rank has done so, and that this rank has printed its reason."""
    if NOTES in os.environ:
        with suppress(OSError):
            told_file(Path(os.environ[NOTES]), os.getpid()).touch()
        with suppress(OSError), (Path(os.environ[NOTES]) / "code").open("x", encoding="utf-8") as file:
            file.write(str(code))


def note_error(text: str) -> None:
    """Write a rank's message into torchrun's error file, so that torchrun prints it at the end of its own message."""
    if NOTES not in os.environ and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def told_file(notes: Path, process: int) -> Path:
    """Return the file that exists if a rank has printed why it ends."""
    return notes / f"{process}.told"


def stack_file(notes: Path, process: int) -> Path:
    """Return the file into which faulthandler writes which signal ended a rank, with the stack."""
    return notes / f"{process}.stack"


def statuses_directory() -> Path | None:
    """Return the directory of the ranks' signs of life; None if tiercel's launcher did not start them."""
    return Path(os.environ[NOTES]) / SIGNS if NOTES in os.environ else None


def noted_code(notes: Path) -> int | None:
    """Return the exit code that the first ended rank has written; None if no rank has."""
    if (notes / "stopped").exists():
        return EXIT_TERMINATED
    if (notes / STALLED).exists():
        return EXIT_STALL
    with suppress(FileNotFoundError, ValueError):
        return int((notes / "code").read_text(encoding="utf-8"))
    return None


def final_code(notes: Path) -> int | None:
    """Return the exit code of an attempt if another one would end in the same way; otherwise None."""
    code = noted_code(notes)
    if code in FINAL_CODES:
        return code
    return EXIT_TRAINING if final_faults(notes) else None


def final_faults(notes: Path) -> dict[int, tuple[int, int]]:
    """Return the ranks that were ended by a signal that would come again: by rank, its process id and minus the signal.
    A rank that has printed why it ends is left out, because its file is from a child process."""
    return {
        int(file.with_suffix(".pid").read_text(encoding="utf-8")): (int(file.stem), -number)
        for file in notes.glob("*.stack")
        for fault, number in FINAL_FAULTS.items()
        if fault in file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        and not told_file(notes, int(file.stem)).exists()
    }
