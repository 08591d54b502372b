"""Every file of a checkpoint cut, flipped, swapped or removed: this is always noticed, and the previous checkpoint is
used."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.tiny_run import hashes, make_tiny_run
from tiercel.runs.checkpoints import MANIFEST, STATE, directory_of, newest_valid

FLIPPED_BITS = {"short": 8, "full": 200}  # in each file, at random
SMALL_FILES = (MANIFEST, STATE)  # all bits of these are flipped in a full run
Damage = tuple[str, Callable[[], None]]


def damage(size: Size, seed: int, work_dir: Path) -> Figure:
    """Save two checkpoints. The newer one is damaged, looked for, and restored, again and again."""
    started = time.perf_counter()
    run = make_tiny_run(work_dir)
    for step in (1, 2):
        run.save(work_dir / "run", step)
    root = work_dir / "run" / "checkpoints"
    newer, kept = directory_of(root, 2), work_dir / "kept"
    shutil.copytree(newer, kept)
    older = hashes(directory_of(root, 1))
    generator = random.Random(seed)
    outcomes: list[Outcome] = []
    for file in sorted(path.relative_to(newer) for path in newer.rglob("*") if path.is_file()):
        damages = [*_cuts(newer / file), *_changes(newer / file, directory_of(root, 1) / file)]
        for name, inflict in [*damages, *_flips(newer / file, size, generator)]:
            inflict()
            outcomes.append((f"{file}, {name}", _problem(root, newer, file.as_posix(), older)))
            _mend(newer / file, kept / file)
    for name, inflict in _whole_directory(newer):
        inflict()
        outcomes.append((name, _problem(root, newer, "", older)))
        shutil.rmtree(newer, ignore_errors=True)
        shutil.rmtree(directory_of(root, 3), ignore_errors=True)
        shutil.copytree(kept, newer)
    return figure_of("damaged checkpoint files", outcomes, seed=seed, seconds=time.perf_counter() - started)


def _cuts(file: Path) -> Iterator[Damage]:
    data = file.read_bytes()
    for length in sorted({0, 1, len(data) // 2, len(data) - 1}):
        yield f"cut to {length} bytes", lambda length=length: _write(file, data[:length])
    yield "deleted", file.unlink


def _changes(file: Path, other: Path) -> Iterator[Damage]:
    data = file.read_bytes()
    middle = len(data) // 2
    yield "a byte appended", lambda: _write(file, data + b"\n" + data[:1])
    zeroed = data[:middle] + bytes(16) + data[middle + 16 :]
    if zeroed != data:
        yield "16 bytes zeroed", lambda: _write(file, zeroed)
    yield "all zeros", lambda: _write(file, bytes(len(data)))
    yield "two halves swapped", lambda: _write(file, data[middle:] + data[:middle])
    yield "a link to nothing", lambda: _replace(file, lambda: file.symlink_to("nothing"))
    yield "a directory", lambda: _replace(file, file.mkdir)
    if other.read_bytes() != data:
        yield "the older checkpoint's", lambda: _write(file, other.read_bytes())
    if file.name == MANIFEST:
        for text in ("[]", '{"sha256": []}', '{"sha256": {}}', "[" * 100_000, '{"sha256": {"state.json": 1}}'):
            yield f"replaced by {text[:40]}", lambda text=text: _write(file, text.encode())


def _flips(file: Path, size: Size, generator: random.Random) -> Iterator[Damage]:
    """Yield single bits: the first and last of the file, and others at random, or all."""
    data = file.read_bytes()
    bits = range(8 * len(data))
    if size == "full" and file.name in SMALL_FILES:
        chosen = list(bits)
    else:
        chosen = sorted({0, bits[-1], *generator.sample(bits, FLIPPED_BITS[size])})
    for bit in chosen:
        yield f"bit {bit} flipped", lambda bit=bit: _write(file, _flipped(data, bit))


def _whole_directory(newer: Path) -> Iterator[Damage]:
    yield "empty", lambda: _replace(newer, newer.mkdir)
    yield "under another step's name", lambda: _replace(newer, lambda: None, directory_of(newer.parent, 3))


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def _replace(path: Path, make: Callable[[], None], aside: Path | None = None) -> None:
    """Remove a file or directory, or move it elsewhere, and create something in its place."""
    if aside is not None:
        path.rename(aside)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make()


def _mend(file: Path, kept: Path) -> None:
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)
    shutil.copyfile(kept, file)


def _problem(root: Path, newer: Path, file: str, older: dict[str, str]) -> str | None:
    """Return what is wrong: the older checkpoint must be found, and the message must name the newer one and its
    damage."""
    said: list[str] = []
    found = newest_valid(root, said.append)
    if found is None or found.step != 1:
        return f"found {found and found.step}"
    if hashes(found.path) != older or found.state["step"] != 1:
        return "the older checkpoint is not what it was"
    if len(said) != 1 or not said[0].startswith(f"checkpoint {newer.parent}") or "is passed over: " not in said[0]:
        return f"it said {said}"
    if file not in (MANIFEST, "") and file not in said[0]:
        return f"it named another file: {said[0]}"
    return None
