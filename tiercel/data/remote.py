"""Read files of rows that lie elsewhere, at URLs of fsspec: each is copied once into the cache, and read from there.

The cache (`data.cache`) has a folder for each URL, `files/HASH`, with the file and copy.json, which says what it is a
copy of. A copy is used as long as the store describes the file in the same way. Copies together have at most
`data.cache_bytes`; the least recently used ones go first, never those that a process reads.
"""

import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import has_magic
from hashlib import sha256
from pathlib import Path
from typing import Any

from tiercel.config.data import Data
from tiercel.config.row_sources import RowSource, row_source
from tiercel.data.index import cache_folder, locked
from tiercel.data.texts import told
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.log import logger
from tiercel.regular_files import read_json
from tiercel.reliability.redaction import redact
from tiercel.writing import writing

TRIES = 4
PAUSE = 1.0  # seconds before the second try, twice as many before each further one
STALL_SECONDS = 180.0  # without an answer, after which a try has failed
_BLOCK = 1 << 22
_SAY_SECONDS = 10.0
_LONGEST_REASON = 500  # characters
_QUERY = re.compile(r"(?<=\S)\?\S+")  # of an address, which may be signed
_in_use: dict[str, int] = {}  # descriptors of locks, held until this process ends


def source_of(given: str) -> RowSource:
    """Parse what a recipe names as rows. Raises DataError."""
    try:
        return row_source(given)
    except ValueError as error:
        raise DataError(f"{given}: {error}") from error


def parts_of(source: RowSource, config: Data, beat: Callable[[], None] = lambda: None) -> list[RowSource]:
    """Return the files of a source, each as a source without a count. Those at a URL are copied into the cache first.
    Raises DataError if one cannot be read, EnvironmentProblem if a package is missing, and RunError if the cache cannot
    be written."""
    if not source.is_remote:
        return [replace(source, path=path, count=None) for path in source.files]
    files = _described(source.path)
    cache = cache_folder(config.cache).with_name("files")
    needed = sum(file.size for file in files)
    if needed > config.cache_bytes:
        raise DataError(told("large for the cache", source.path, needed, config.cache_bytes))
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        return [
            RowSource(path=str(_copy(file, cache, config.cache_bytes, files, beat)), url=file.url) for file in files
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """A file of a store, as the store describes it."""

    url: str
    path: str
    store: Any  # fsspec's file system
    size: int
    state: str  # a hash of the description

    @property
    def key(self) -> str:
        return _hash(self.url)

    @property
    def name(self) -> str:
        """Return the last part of its path, without the query of an address."""
        return Path(self.path.partition("?")[0] if self.url.startswith("http") else self.path).name


def _described(url: str) -> list[_File]:
    """Ask a store about the files that a URL or a pattern names."""
    from fsspec.core import url_to_fs  # imported here because most runs read files of their own machine
    from fsspec.registry import known_implementations

    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        remedy = known_implementations.get(url.partition("://")[0], {}).get("err", str(error))
        raise EnvironmentProblem(f"{url}: this needs a package that is not installed: {remedy}") from error
    except ValueError as error:
        raise DataError(f"{url}: {_reason(error)}") from error
    is_pattern = has_magic(path)

    def ask() -> dict[str, Any]:
        store.invalidate_cache()
        return store.glob(path, detail=True) if is_pattern else {path: store.info(path)}

    found = {name: about for name, about in sorted(_tried(url, ask).items()) if about["type"] == "file"}
    if not found and not is_pattern:
        raise DataError(f"{url}: is a folder; name its files, for example {url.rstrip('/')}/*.parquet")
    if unknown := [name for name, about in found.items() if about["size"] is None]:
        raise DataError(f"{url}: the server does not say how long {unknown[0]} is; download it, and name your copy")
    return [
        _File(
            url=store.unstrip_protocol(name) if is_pattern else url,
            path=name,
            store=store,
            size=about["size"],
            state=_hash({key: value for key, value in about.items() if "access" not in key}),  # reading changes that
        )
        for name, about in found.items()
    ]


def _hash(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _copy(file: _File, cache: Path, most: int, beside: list[_File], beat: Callable[[], None]) -> Path:
    """Return the copy of a file; make it if there is none, or if it is of another state of the file."""
    folder = cache / file.key
    about, copy = folder / "copy.json", folder / file.name
    with locked(folder.with_suffix(".lock"), beat):
        if file.key not in _in_use:
            _in_use[file.key] = os.open(folder.with_suffix(".used"), os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(_in_use[file.key], fcntl.LOCK_SH)
        if (before := _state(about)) != file.state or not copy.is_file() or copy.stat().st_size != file.size:
            if before not in (None, file.state):
                logger.warning(f"{file.url}: has changed since it was copied into {cache}; it is copied again")
            _make_room(cache, most - file.size, {each.key for each in beside})
            folder.mkdir(exist_ok=True)
            part = folder / f"{copy.name}.part"
            try:
                with part.open("wb") as stream:
                    for block in _blocks(file):
                        stream.write(block)
                        beat()
            except BaseException:  # no one else removes it
                part.unlink(missing_ok=True)
                raise
            about.unlink(missing_ok=True)
            part.replace(copy)
            about.write_text(json.dumps({"url": file.url, "state": file.state}), encoding="utf-8")
        os.utime(about)
    return copy


def _state(about: Path) -> str | None:
    with suppress(OSError, LookupError, TypeError):
        return str(read_json(about)["state"])
    return None


def _make_room(cache: Path, most: int, wanted: set[str]) -> None:
    """Remove copies that were not used for the longest time, until the others have at most `most` bytes. Those that are
    wanted now, or that a process reads, stay."""
    used, sizes = dict[Path, float](), dict[Path, int]()
    for about in cache.glob("*/copy.json"):
        with suppress(FileNotFoundError):  # another process makes room as well
            used[about.parent] = about.stat().st_mtime
            sizes[about.parent] = sum(file.stat().st_size for file in about.parent.iterdir())
    total = sum(sizes.values())
    for folder, size in sorted(sizes.items(), key=lambda each: used[each[0]]):
        if total <= most:
            return
        if folder.name in wanted:
            continue
        with folder.with_suffix(".used").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)
            total -= size


def _blocks(file: _File) -> Iterator[bytes]:
    """Yield a file's bytes; after a failure go on from where it came."""
    done, spoken = 0, time.monotonic()
    while done < file.size:

        def open_there(start: int = done) -> Any:
            stream = file.store.open(file.path, "rb", block_size=_BLOCK)
            stream.seek(start)
            return stream, stream.read(_BLOCK)

        stream, block = _tried(file.url, open_there)
        with stream:
            while block:
                yield block
                done += len(block)
                if time.monotonic() - spoken > _SAY_SECONDS:
                    spoken = time.monotonic()
                    logger.info(f"{file.url}: {done / file.size:.0%} of {file.size:,} bytes copied")
                try:
                    block = _answered(partial(stream.read, _BLOCK))
                except Exception as error:  # tried again above
                    logger.debug(f"{file.url}: {_reason(error)}")
                    break
            else:
                if done != file.size:
                    raise DataError(f"{file.url}: has {done:,} bytes, but its store says {file.size:,}")


def _tried(url: str, ask: Callable[[], Any]) -> Any:
    """Ask a store, several times if it fails."""
    for attempt in range(1, TRIES + 1):
        try:
            return _answered(ask)
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{url}: cannot be read: {_reason(error)}") from error
        except Exception as error:  # each store's package raises errors of its own
            if attempt == TRIES:
                raise DataError(f"{url}: cannot be read: {_reason(error)} (tried {TRIES} times)") from error
            logger.debug(f"{url}: {_reason(error)}")
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


def _answered(ask: Callable[[], Any]) -> Any:
    """Ask a store in a thread, because some of the packages wait forever for a server that stalls. Raises TimeoutError
    after STALL_SECONDS."""
    answer = Future[Any]()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True, name="tiercel-store").start()
    if not wait([answer], STALL_SECONDS).done:
        raise TimeoutError(f"no answer for {STALL_SECONDS:g} s")
    return answer.result()


def _reason(error: Exception) -> str:
    """Return what a store's package said, without secrets and signatures."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return redact(_QUERY.sub("?...", text))[:_LONGEST_REASON]
