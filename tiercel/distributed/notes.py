"""What ranks note for the launcher of `--nproc` that started them, in a directory of its own: process ids, why they
end, what they do. Imports nothing heavy, for it is a rank's first act."""

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from tiercel.errors import EXIT_STALL, EXIT_TERMINATED, EXIT_TRAINING, EXIT_USER
from tiercel.reliability.stall_files import CALL

NOTES = "TIERCEL_LAUNCH_NOTES"  # the directory; set for ranks that tiercel's own launcher started
FINAL_CODES = (EXIT_USER, EXIT_TERMINATED)  # starting again would end in the same way
FINAL_FAULTS = {
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}  # by faulthandler's words
PARENT_CHECK_SECONDS = 1.0
SIGNS = "signs"
STALLED = f"{SIGNS}/{CALL}"


def start_notes() -> int | None:
    """A rank's first act: its process id for the launcher, and a file for the stack of a signal that ends it. An exit
    code where an earlier attempt found that nothing would be won by another."""
    if NOTES not in os.environ:
        if "RANK" in os.environ:
            faulthandler.enable()
        return None
    notes = Path(os.environ[NOTES])
    if (code := final_code(notes)) is not None:
        return code
    (notes / f"{os.getpid()}.pid").touch()
    faulthandler.enable(stack_file(notes, os.getpid()).open("w", encoding="utf-8"))
    for file in (notes / "code", notes / STALLED):  # of an earlier attempt
        file.unlink(missing_ok=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    return None


def note_code(code: int) -> None:
    """Note why this rank ends, unless another one was first; and that it has said so itself."""
    if NOTES in os.environ:
        with suppress(OSError):
            told_file(Path(os.environ[NOTES]), os.getpid()).touch()
        with suppress(OSError), (Path(os.environ[NOTES]) / "code").open("x", encoding="utf-8") as file:
            file.write(str(code))


def note_error(text: str) -> None:
    """Hand torchrun what a rank said, so that it stands at the end of torchrun's own words, where it has a place for
    that."""
    if NOTES not in os.environ and (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        told = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def told_file(notes: Path, process: int) -> Path:
    """There where a rank has said why it ends."""
    return notes / f"{process}.told"


def stack_file(notes: Path, process: int) -> Path:
    """Where faulthandler writes the fault that ends a rank, and its stack."""
    return notes / f"{process}.stack"


def signs_directory() -> Path | None:
    """Where ranks tell each other what they do; None where another launcher started them, or none."""
    return Path(os.environ[NOTES]) / SIGNS if NOTES in os.environ else None


def noted_code(notes: Path) -> int | None:
    """Why the ranks end, by the first of them that said so."""
    if (notes / "stopped").exists():
        return EXIT_TERMINATED
    if (notes / STALLED).exists():
        return EXIT_STALL
    with suppress(FileNotFoundError, ValueError):
        return int((notes / "code").read_text(encoding="utf-8"))
    return None


def final_code(notes: Path) -> int | None:
    """The exit code of an attempt after which another would end in the same way."""
    code = noted_code(notes)
    if code in FINAL_CODES:
        return code
    return EXIT_TRAINING if final_faults(notes) else None


def final_faults(notes: Path) -> dict[int, int]:
    """By process, signals that ended ranks and would only come again. A rank that said why it ends lost a process of
    its own, which shares the file."""
    return {
        int(file.stem): number
        for file in notes.glob("*.stack")
        for fault, number in FINAL_FAULTS.items()
        if fault in file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        and not told_file(notes, int(file.stem)).exists()
    }


def _end_with_parent(parent: int) -> None:
    """Ranks have sessions of their own, so a killed launcher would leave them."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(EXIT_TRAINING)
