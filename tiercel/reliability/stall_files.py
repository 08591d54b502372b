"""What ranks tell each other on disk while they cannot speak: their signs, and their stacks."""

import faulthandler
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tiercel.reliability.stall import Sign

HAS_STACKS = "has_stacks"


class SignFiles:
    """One small file for each rank, replaced whole, and one that is there once a rank has called out."""

    def __init__(self, directory: Path, world_size: int):
        self.directory = directory
        self.world_size = world_size

    def write(self, sign: Sign, *, has_stacks: bool = False) -> None:
        """A full disk must not end a run that would go on, so a sign may be lost."""
        file = self._file(sign.rank)
        with suppress(OSError):
            self.directory.mkdir(exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps({HAS_STACKS: has_stacks, **sign.as_json()}), encoding="utf-8")
            temporary.replace(file)

    def read(self) -> list[Sign | None]:
        """By rank; None where there is none."""
        return [self._read(rank)[0] for rank in range(self.world_size)]

    def changed_since(self, before: Sequence[Sign | None]) -> list[Sign]:
        """By rank. One that wrote nothing new is silent."""
        signs = []
        for rank, old in enumerate(before):
            new = self._read(rank)[0]
            if new is None:
                new = Sign(rank=rank, phase="start", phases=0, step=0, quiet_seconds=0.0, limit_seconds=0.0)
            is_silent = old is None or new.looks == old.looks
            signs.append(replace(new, is_silent=is_silent))
        return signs

    def have_stacks(self, signs: Sequence[Sign]) -> bool:
        """Whether all ranks that can write have written their stacks."""
        return all(sign.is_silent or self._read(sign.rank)[1] for sign in signs)

    def call_out(self) -> None:
        """Tell all ranks that the run stands still."""
        with suppress(OSError):
            self._call.touch()

    def is_called_out(self) -> bool:
        return self._call.exists()

    def forget(self, rank: int) -> None:
        """Before a rank's first sign, and after its last."""
        self._file(rank).unlink(missing_ok=True)
        self._call.unlink(missing_ok=True)

    @property
    def _call(self) -> Path:
        return self.directory / "stalled"

    def _file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _read(self, rank: int) -> tuple[Sign | None, bool]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            fields = json.loads(self._file(rank).read_text(encoding="utf-8"))
            has_stacks = fields.pop(HAS_STACKS)
            fields["rows"] = tuple(fields["rows"])
            fields["path"] = tuple((file, line) for file, line in fields["path"])
            return Sign(**fields), has_stacks
        return None, False


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
