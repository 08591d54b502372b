"""A disk that crashes at its k-th operation, and what is left on it.

Operations are everything that changes a directory: opening to write, each write, mkdir, rename, unlink, rmdir, fsync.
They are patched in this process, so that one run of a save stops at any of them. The writing of safetensors counts as
an open and a write. Removed files are kept elsewhere, so that no inode number is used twice.
"""

import builtins
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import safetensors.torch

# stopped: the operation and all after it do not happen, what was written stays (the process dies)
# half:    the same, but of a write the first half happens
# lost:    the power fails: bytes of files that were not flushed are gone, names stay
# undone:  the power fails: names that were not flushed are undone too
Ending = Literal["stopped", "half", "lost", "undone"]
ENDINGS: tuple[Ending, ...] = get_args(Ending)


class Crash(BaseException):
    """The machine is gone. No code may handle this."""


class CrashingDisk:
    """Watches `root`. Without `crash_at`, it only counts operations."""

    def __init__(self, root: Path, aside: Path, crash_at: int | None = None, ending: Ending = "stopped"):
        self.root = root
        self.aside = aside
        self.crash_at = crash_at
        self.ending = ending
        self.operations: list[str] = []
        self.has_crashed = False
        self._kept = 0
        self._durable_bytes: dict[int, bytes] = {}
        self._durable_names: dict[int, dict[str, int]] = {}
        self._dirty: set[int] = set()
        self._real = {name: getattr(os, name) for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")}
        self._real_open = io.open
        self._real_serialise = safetensors.torch.serialize_file
        aside.mkdir(parents=True, exist_ok=True)
        self._note_durable(root)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the operations inside, and crash."""
        replaced: list[tuple[Any, str, Callable]] = [
            (os, "mkdir", self._mkdir),
            (os, "rename", self._renaming("rename")),
            (os, "replace", self._renaming("replace")),
            (os, "unlink", self._removing("unlink")),
            (os, "remove", self._removing("unlink")),
            (os, "rmdir", self._removing("rmdir")),
            (os, "fsync", self._fsync),
            (io, "open", self._open),
            (builtins, "open", self._open),
            (safetensors.torch, "serialize_file", self._serialise),
        ]
        patches = [patch.object(owner, name, function) for owner, name, function in replaced]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in reversed(patches):
                each.stop()

    def remains(self, destination: Path) -> Path:
        """Return a copy of the directory as it is found after the crash."""
        if self.ending == "undone":
            self._restore(self.root.stat().st_ino, destination)
            return destination
        shutil.copytree(self.root, destination)
        if self.ending == "lost":
            for path in self.root.rglob("*"):
                inode = path.stat().st_ino
                if path.is_file() and inode in self._dirty:
                    (destination / path.relative_to(self.root)).write_bytes(self._durable_bytes.get(inode, b""))
        return destination

    def _note_durable(self, directory: Path) -> None:
        self._durable_names[directory.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(directory)}
        for path in directory.iterdir():
            if path.is_dir():
                self._note_durable(path)
            else:
                self._durable_bytes[path.stat().st_ino] = path.read_bytes()

    def _restore(self, inode: int, destination: Path) -> None:
        destination.mkdir()
        for name, child in self._durable_names.get(inode, {}).items():
            if child in self._durable_names:
                self._restore(child, destination / name)
            else:
                (destination / name).write_bytes(self._durable_bytes.get(child, b""))

    def _step(self, operation: str) -> None:
        """Count an operation that is about to happen."""
        if self.has_crashed or len(self.operations) == self.crash_at:
            self.has_crashed = True
            raise Crash(operation)
        self.operations.append(operation)

    def _mkdir(self, path: Any, *arguments: Any, **keywords: Any) -> None:
        self._step("mkdir")
        self._real["mkdir"](path, *arguments, **keywords)
        self._durable_names[os.stat(path, dir_fd=keywords.get("dir_fd")).st_ino] = {}

    def _renaming(self, name: str) -> Callable:
        def rename(source: Any, target: Any, **keywords: Any) -> None:
            self._step(name)
            if os.path.isfile(target):
                os.link(target, self._place_aside())
            self._real[name](source, target, **keywords)

        return rename

    def _removing(self, name: str) -> Callable:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            if name == "rmdir" and os.path.isdir(path) and os.listdir(path):
                raise OSError(f"{path} is not empty")
            self._step(name)
            self._real["rename"](path, self._place_aside(), src_dir_fd=dir_fd)

        return remove

    def _place_aside(self) -> Path:
        self._kept += 1
        return self.aside / str(self._kept)

    def _fsync(self, descriptor: int) -> None:
        self._step("fsync")
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            names = {entry.name: entry.inode() for entry in os.scandir(descriptor)}
            self._durable_names[status.st_ino] = names
            return
        with self._real_open(f"/proc/self/fd/{descriptor}", "rb") as file:
            self._durable_bytes[status.st_ino] = file.read()
        self._dirty.discard(status.st_ino)

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        is_watched = not isinstance(file, int) and Path(os.fsdecode(file)).is_relative_to(self.root)
        if not is_watched or not set(mode) & set("wax+"):
            return self._real_open(file, mode, *arguments, **keywords)
        self._step("open")
        raw = io.FileIO(os.fspath(file), mode.replace("b", "").replace("t", ""))
        self._dirty.add(os.fstat(raw.fileno()).st_ino)
        return _WrittenFile(self, raw)

    def write(self, raw: io.FileIO, data: bytes) -> None:
        """Perform one write to an open file."""
        try:
            self._step("write")
        except Crash:
            if self.ending == "half" and len(self.operations) == self.crash_at:
                raw.write(data[: len(data) // 2])
            raise
        raw.write(data)
        self._dirty.add(os.fstat(raw.fileno()).st_ino)

    def _serialise(self, tensors: Any, filename: Any, **keywords: Any) -> None:
        whole = self._place_aside()
        self._real_serialise(tensors, str(whole), **keywords)
        with self._open(filename, "wb") as file:
            file.write(whole.read_bytes())


class _WrittenFile:
    """A file open for writing without a buffer, so that each write is an operation."""

    def __init__(self, disk: CrashingDisk, raw: io.FileIO):
        self.disk = disk
        self.raw = raw

    def __enter__(self) -> "_WrittenFile":
        return self

    def __exit__(self, *ending: object) -> None:
        self.raw.close()

    def write(self, data: str | bytes) -> int:
        self.disk.write(self.raw, data.encode() if isinstance(data, str) else data)
        return len(data)

    def flush(self) -> None:
        pass

    def fileno(self) -> int:
        return self.raw.fileno()

    def close(self) -> None:
        self.raw.close()
