"""Accidents in a run directory, in place of a file that the run wrote or next to it."""

import ctypes
import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.faults.kills import LONGEST_RUN_SECONDS, forked, waited
from benchmarks.faults.processes import TinyRuns
from tiercel.reliability.heartbeat import HEARTBEATS

STEPS = 2  # of the run; a checkpoint after each
MOST_MEMORY = 2 << 30  # bytes of address space that a process may use beyond those at its start
SPARSE_BYTES = 6 << 30
DEEP = 200_000  # brackets
_CAPABILITIES = 0x20080522  # the version of the system call
_OVERRIDE = 0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: root reads what nobody may read


def _written(data: bytes) -> Callable[[Path], None]:
    return lambda file: _put(file, lambda: file.write_bytes(data))


def _line(data: bytes) -> Callable[[Path], None]:
    """Return an accident that puts a line into the middle of a file."""

    def put(file: Path) -> None:
        first, *others = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join([first.rstrip(b"\n") + b"\n", data + b"\n", *others]))

    return put


def _put(file: Path, make: Callable[[], object]) -> None:
    file.unlink()
    make()


def _sparse(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(SPARSE_BYTES)


def _socket(file: Path) -> None:
    """Put a socket in place of the file. The name may be longer than a socket's address."""
    file.unlink()
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(file.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.fchdir(before)
        os.close(before)


def _copy(file: Path) -> None:
    shutil.copy(file, file.with_name(f"{file.stem} (copy){file.suffix}"))


LINES: Mapping[str, Callable[[Path], None]] = {
    "a line null": _line(b"null"),
    "a line []": _line(b"[]"),
    "a line that is a number": _line(b"3"),
    "a line that is a text": _line(b'"step"'),
    "a line NaN": _line(b"NaN"),
    "a line with the step NaN": _line(b'{"step": NaN, "loss": NaN}'),
    "a line with the step 1e400": _line(b'{"step": 1e400}'),
    "a line with a step of 30 digits": _line(b'{"step": ' + b"9" * 30 + b"}"),
    "a line with a number of 5000 digits": _line(b'{"step": ' + b"9" * 5000 + b"}"),
    "a line with odd values": _line(
        b'{"step": 1, "loss": [1], "grad_norm": {}, "time/step": "x", "reward/mean": null}'
    ),
    "a line with true for numbers": _line(b'{"step": true, "loss": true}'),
    "a line with half a surrogate pair": _line(b'{"step": 1, "\\ud800": "\\udfff"}'),
    "a line of deep JSON": _line(b"[" * DEEP),
    "a line of deep JSON that ends": _line(b"[" * DEEP + b"]" * DEEP),
    "a line of deep objects": _line(b'{"a":' * DEEP),
    "bytes that are no UTF-8": _line(b"\xff\xfe\x80"),
    "a line of zeros": _line(bytes(4096)),
}
IN_PLACE: Mapping[str, Callable[[Path], None]] = {
    "null": _written(b"null"),
    "[]": _written(b"[]"),
    "a number": _written(b"3"),
    "a text": _written(b'"text"'),
    "NaN": _written(b"NaN"),
    "nothing": _written(b""),
    "zeros": _written(bytes(4096)),
    "no UTF-8": _written(b"\xff\xfe\x80\xc0"),
    "deep JSON": _written(b"[" * DEEP),
    "deep JSON that ends": _written(b'{"step": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "a pipe": lambda file: _put(file, lambda: os.mkfifo(file)),
    "a device": lambda file: _put(file, lambda: file.symlink_to("/dev/zero")),
    "a socket": _socket,
    "a directory": lambda file: _put(file, file.mkdir),
    "a link to nothing": lambda file: _put(file, lambda: file.symlink_to("nothing")),
    "a link to itself": lambda file: _put(file, lambda: file.symlink_to(file.name)),
    "6 GB of nothing": _sparse,
    "a file that may not be read": lambda file: file.chmod(0),
    "a copy beside it": _copy,
}
ACCIDENTS: Mapping[str, Callable[[Path], None]] = {**LINES, **IN_PLACE}


def made_run(work: Path) -> Path:
    """Make a real run that has ended, with the files of one that was killed or stalled, and return its recipe."""
    runs = TinyRuns(work)
    recipe = runs.recipe(
        "grpo",
        "run",
        data={"eval": str(runs.rows), "workers": 0},
        train={"steps": STEPS, "save_every": 1, "eval_every": 1, "threads": 1},
        rollout={"record_tokens": 2},
        learner={"max_tokens_per_microbatch": "auto"},
    )
    if (code := waited(forked("grpo", recipe, work / "log"), LONGEST_RUN_SECONDS)) != 0:
        raise RuntimeError(f"the run ended with {code}: {(work / 'log').read_text()[-800:]}")
    run = recipe.with_suffix("")
    bad = {"id": "row-1", "file": str(runs.rows), "line": 2, "field": "images", "reason": "no such file"}
    sign = {"rank": 0, "phase": "learn", "step": 2, "rows": ["row-1"], "quiet_seconds": 1.0, "limit_seconds": 60.0}
    for name, text in (
        ("bad_rows.jsonl", json.dumps(bad) + "\n"),
        (f"{HEARTBEATS}/rank-0.json", json.dumps(sign)),
        ("stall/step-000001/message.txt", "stalled: rank 0 waits\n"),
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text, encoding="utf-8")
        os.utime(run / name, (0, 0))  # long ago
    return recipe


def mended(run: Path, kept: Path) -> None:
    """Restore a run from its copy."""
    if run.is_dir():
        for path in run.rglob("*"):
            if not path.is_symlink():
                with suppress(OSError):
                    path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(kept, run, symlinks=True)


def take_limits() -> None:
    """Limit the memory of this process, and make files that nobody may read unreadable for root too."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY, resource.RLIM_INFINITY))
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, held) == 0:
        held[0] &= ~_OVERRIDE
        held[1] &= ~_OVERRIDE
        libc.capset(header, held)
