"""What ranks tell each other on disk while they cannot speak: their signs, a judgement on them, and their stacks."""

import faulthandler
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiercel.reliability.stall import Sign

HAS_STACKS = "has_stacks"
CALL = "stalled"  # the file that a rank calls out by
NOWHERE = Path(os.devnull) / "signs"  # where nothing can be: a rank without others has nobody to tell


class SignFiles:
    """One small file for each rank, replaced whole, and one that is there once a rank has called out."""

    def __init__(self, directory: Path, world_size: int):
        self.directory = directory
        self.world_size = world_size

    def write(self, sign: Sign, *, has_stacks: bool = False) -> None:
        """A full disk must not end a run that would go on, so a sign may be lost, but not that there was one."""
        file = self._file(sign.rank)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps({HAS_STACKS: has_stacks, **sign.as_json()}))
        except OSError:
            with suppress(OSError):
                os.utime(file)

    def read(self) -> list[Sign | None]:
        """By rank; None where there is none."""
        return [self._read(rank)[0] for rank in range(self.world_size)]

    def moment(self, rank: int) -> float | None:
        """When the rank last wrote, in seconds of the file system's clock; None where it has no file."""
        with suppress(OSError):
            return self._file(rank).stat().st_mtime
        return None

    def changed_since(self, before: Sequence[Sign | None], *, now: float, began: float, limit: float) -> list[Sign]:
        """By rank. One that wrote nothing new is silent, since its last sign or since `began`. `now`, `began`: by the
        file system's clock; `limit`: seconds of silence that are a stall."""
        signs = []
        for rank, old in enumerate(before):
            new = self._read(rank)[0]
            if new is not None and (old is None or new.looks != old.looks):
                signs.append(new)
                continue
            since = max(began, self.moment(rank) or began)
            last = new or Sign(rank=rank, phase="launch", phases=0, step=0, quiet_seconds=0.0, limit_seconds=limit)
            signs.append(last.silent_for(max(0.0, now - since), limit, process_state(last)))
        return signs

    def have_stacks(self, signs: Sequence[Sign]) -> bool:
        """Whether all ranks that can write have written their stacks."""
        return all(sign.is_silent or self._read(sign.rank)[1] for sign in signs)

    def call_out(self, signs: Sequence[Sign]) -> Sequence[Sign]:
        """Tell all ranks that the run stands still, by these signs. Returns those that all go by: another rank may have
        been first."""
        draft = self.directory / f"{CALL}.{os.getpid()}.tmp"
        with suppress(OSError):
            draft.write_text(json.dumps([sign.as_json() for sign in signs]), encoding="utf-8")
            with suppress(FileExistsError):
                os.link(draft, self._call)  # unlike a renaming, it fails where the file is there
            draft.unlink()
        return self.called_out() or signs

    def called_out(self) -> Sequence[Sign] | None:
        """The signs that a rank called out by."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            return [_sign(fields) for fields in json.loads(self._call.read_text(encoding="utf-8"))]
        return None

    def forget(self, rank: int) -> None:
        """Before a rank's first sign, and after its last."""
        for file in (self._file(rank), self._call):
            with suppress(OSError):
                file.unlink()

    def leave(self, rank: int) -> None:
        """The rank's last act; the last rank of a run that never began leaves no directory behind."""
        self.forget(rank)
        with suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()

    @property
    def _call(self) -> Path:
        return self.directory / CALL

    def _file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _read(self, rank: int) -> tuple[Sign | None, bool]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            fields = json.loads(self._file(rank).read_text(encoding="utf-8"))
            has_stacks = fields.pop(HAS_STACKS)
            return _sign(fields), has_stacks
        return None, False


def _write(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def _sign(fields: dict[str, Any]) -> Sign:
    path = tuple((file, line) for file, line in fields["path"])
    return Sign(**{**fields, "rows": tuple(fields["rows"]), "path": path})


def process_state(sign: Sign) -> str:
    """The state of the process that gave a sign, by /proc's letter, where it is one of this machine; nothing where that
    is not known."""
    if sign.host != platform.node() or not sign.process:
        return ""
    try:
        return Path(f"/proc/{sign.process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z" if Path("/proc/self").exists() else ""
    except OSError:
        return ""


def stack_name(rank: int) -> str:
    return f"rank-{rank}.txt"


def write_stacks(directory: Path, rank: int) -> None:
    """Python stacks of all threads of this process."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / stack_name(rank)).open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def read_stack(directory: Path, rank: int) -> str:
    """What `write_stacks` wrote, or nothing."""
    with suppress(OSError):
        return (directory / stack_name(rank)).read_text(encoding="utf-8")
    return ""
