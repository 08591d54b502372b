"""Download the pictures whose URLs stand in a recipe's rows, once, and write the rows with the names of the files.

The folder has pictures/HH/HASH.ENDING, named by hashes of the URLs; rows in train.jsonl, mix-N.jsonl and eval.jsonl;
and failed.jsonl. A picture gets its name when it is whole, so one that is there is not downloaded again.
"""

import base64
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tiercel.config.data import Data
from tiercel.config.row_sources import RowSource, names_in
from tiercel.data.formats.columns import VISUALS, foreign_columns, missing_numbers
from tiercel.data.formats.message_parts import IN_ORDER
from tiercel.data.formats.registry import default_id
from tiercel.data.index import locked
from tiercel.data.media.download import Web, download
from tiercel.data.media.file_names import visual_of
from tiercel.data.media.images import is_web_address, path_problem, shown_path
from tiercel.data.order import chosen
from tiercel.data.readers import Record, records_of
from tiercel.data.reading import heldout_source, require_count, sources_of
from tiercel.data.rejected_rows import write_bad_rows
from tiercel.data.remote import parts_of, source_of
from tiercel.data.row_files import image_roots_of, telling_unreadable
from tiercel.data.texts import told
from tiercel.data.turns import parts_of_text, with_turns_of_text
from tiercel.errors import DataError, RunError
from tiercel.log import logger
from tiercel.types import ImageRoots, RejectedRow
from tiercel.writing import writing

FAILED, PICTURES = "failed.jsonl", "pictures"
_COLUMNS = (*VISUALS, "file_name")
_CONTENTS = ("content", "value")  # of a turn
_LOCK, _PART = ".fetch.lock", ".part"
_SAY_SECONDS = 10.0
_AHEAD = 4  # downloads that wait, for each that runs

Change = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Says what was done. `values` has the keys of the recipe that use it; `failed` has the rows that lack a
    picture."""

    values: Mapping[str, str]
    row_count: int
    downloaded: int
    found: int  # pictures that were there
    failed: tuple[RejectedRow, ...]


def fetch(data: Data, folder: Path, web: Web, parallel: int) -> Fetched:
    """Download the pictures of all rows that name URLs, `parallel` at a time, into `folder`. Raises DataError if rows
    cannot be read or none names a URL, and RunError if the folder cannot be written. A picture that fails does not
    raise."""
    named = {**sources_of(data), **heldout_source(data)}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / _LOCK).exists():
            raise RunError(told("other files in the folder", folder))
    with writing(folder), locked(folder / _LOCK, lambda: None):
        sources = [_Source(given, own) for given, own in named.values()]
        urls_of = [source.urls() for source in sources]
        urls = list(dict.fromkeys(chain.from_iterable(urls_of)))
        if not urls:
            raise DataError("no row names a picture by a URL, so there is nothing to download")
        there = _downloaded_before(folder)
        wanted = [url for url in urls if _hash(url) not in there]
        found = dict(_downloaded(wanted, folder / PICTURES, web, parallel))
        there |= {_hash(url): file.relative_to(folder) for url, file in found.items() if isinstance(file, Path)}
        problems = {url: reason for url, reason in found.items() if isinstance(reason, str)}
        values: dict[str, str] = {}
        failed: list[RejectedRow] = []
        roots = dict.fromkeys(data.image_roots)
        count = 0
        for key, source, own_urls in zip(named, sources, urls_of, strict=True):
            if own_urls:
                file = folder / f"{key.removeprefix('data.').removesuffix('.path').replace('.', '-')}.jsonl"
                lines, rows, places = source.write(file, there, problems)
                values[key], count = str(file), count + lines
                failed += rows
                roots |= dict.fromkeys(places)
        (folder / FAILED).unlink(missing_ok=True)
        write_bad_rows(failed, folder / FAILED)
    if tuple(roots) != data.image_roots:
        values["data.image_roots"] = json.dumps(list(roots))
    return Fetched(
        values=values,
        row_count=count,
        downloaded=len(wanted) - len(problems),
        found=len(urls) - len(wanted),
        failed=tuple(failed),
    )


def _downloaded_before(folder: Path) -> dict[str, Path]:
    """Return the pictures that are there, relative to `folder`, by the hashes of their URLs. What a process that was
    killed has left of others is removed."""
    there: dict[str, Path] = {}
    for file in (folder / PICTURES).glob("*/*"):
        if file.suffix == _PART:
            file.unlink()
        elif file.stat().st_size:
            there[file.stem] = file.relative_to(folder)
    return there


def _records(parts: Sequence[RowSource]) -> Iterator[tuple[RowSource, Record]]:
    for part in parts:
        with telling_unreadable(part.name):
            yield from ((part, record) for record in records_of(part))


def _chosen(source: RowSource, parts: Sequence[RowSource]) -> tuple[Sequence[RowSource], frozenset[int] | None]:
    """Return the files of a source and the numbers of the rows that its count chooses; None for all."""
    if source.count is None:
        return parts, None
    total = sum(1 for _ in _records(parts))
    require_count(source.count, total, source.name)
    numbers = np.arange(total)
    kept = chosen(np.zeros(total), numbers, map(str, numbers), source.count, "part of a file")
    return parts, frozenset(kept.tolist())


class _Source:
    """The rows of one key of a recipe."""

    def __init__(self, given: str | Sequence[str], config: Data):
        self.config = config
        names = [config.columns.get(name, name) for name in (*_COLUMNS, *IN_ORDER)]
        self._picture_columns = {*names, *(name.partition(".")[0] for name in names)}
        self._sources = [_chosen(source, parts_of(source, config)) for source in map(source_of, names_in(given))]

    def records(self) -> Iterator[tuple[RowSource, Record]]:
        """Yield each record with its file; of a part, only those that are chosen."""
        for parts, numbers in self._sources:
            for number, found in enumerate(_records(parts)):
                if numbers is None or number in numbers:
                    yield found

    def urls(self) -> dict[str, None]:
        """Return the URLs of all pictures, each once."""
        found: dict[str, None] = {}

        def add(path: str) -> str:
            if is_web_address(path):
                found[path] = None
            return path

        for _, record in self.records():
            _changed(record.value, self.config.columns, add)
        return found

    def write(
        self, file: Path, there: Mapping[str, Path], problems: Mapping[str, str]
    ) -> tuple[int, list[RejectedRow], Sequence[str]]:
        """Write the rows, with the names of files in place of URLs. Return their number, those that lack a picture, and
        the directories that data.image_roots needs for them. A picture is named relative to the file if the recipe has
        no data.image_root, else by its whole path; then it is the other pictures whose paths stay as they are."""
        is_beside = self.config.image_root is None
        roots_of = cache(partial(image_roots_of, config=self.config))
        folder = Path() if is_beside else file.parent.absolute()
        places = {} if is_beside else {str(folder): None}
        failed: list[RejectedRow] = []
        left_out: dict[str, str] = {}
        lacking: list[str] = []

        def change(roots: ImageRoots, path: str) -> str:
            if is_web_address(path):
                lacking.extend([path] if path in problems else [])
                return path if path in problems else str(folder / there[_hash(path)])
            if path_problem(path) is not None:  # such as a picture in base64
                return path
            places.update(dict.fromkeys((*([roots.base] if is_beside else []), *roots.more)))
            return str((Path(roots.base) / path).absolute()) if is_beside else path

        count = 0
        part = file.with_suffix(_PART)  # the rows may be those of `file`
        with writing(file), part.open("w", encoding="utf-8") as stream:
            for source, record in self.records():
                name, count, reason = source.name, count + 1, record.problem
                roots = roots_of(source)
                if reason is None:
                    foreign = missing_numbers(record.value) | foreign_columns(record.value, self._picture_columns)
                    left_out |= foreign
                    value = {key: each for key, each in record.value.items() if key not in foreign}
                    try:
                        changed = _changed(value, self.config.columns, partial(change, roots))
                        line = json.dumps(changed, default=_base64, allow_nan=False)
                        stream.write(line + "\n")
                    except (TypeError, ValueError, RecursionError) as error:
                        reason = f"has a value that JSON does not have: {error}"
                id = str(record.value.get("id") or default_id(name, record.line))
                reasons = [f"{shown_path(url)}: {problems[url]}" for url in lacking] + ([reason] if reason else [])
                if reasons:
                    field = "row" if reason else "images"
                    failed.append(
                        RejectedRow(id=id, file=name, line=record.line, field=field, reason="; ".join(reasons))
                    )
                lacking.clear()
        with writing(file):
            part.replace(file)
        for key, kind in left_out.items():
            logger.warning(f"{file}: column {key} is left out, because it has values of type {kind}")
        return count, failed, list(places)


def _changed(record: Mapping[str, Any], column_names: Mapping[str, str], change: Change) -> dict[str, Any]:
    """Copy a record with each path or URL of a picture changed: those in the columns of pictures, and in parts of
    turns."""
    with suppress(DataError):  # otherwise the run rejects this row
        record = with_turns_of_text(record)
    found = {key: _in_parts(value, change) for key, value in record.items()}
    for name in _COLUMNS:
        path = column_names.get(name, name)
        found = _within(found, [path] if path in found else path.split("."), change)
    return found


def _within(value: Any, path: Sequence[str], change: Change) -> Any:
    if not path:
        return _everywhere(value, change)
    if isinstance(value, dict) and path[0] in value:
        return {**value, path[0]: _within(value[path[0]], path[1:], change)}
    return value


def _everywhere(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_everywhere(each, change) for each in value]
    if isinstance(value, dict) and value.get("bytes") is None:  # else the path is only a name
        return {key: _everywhere(each, change) for key, each in value.items()}
    return value


def _in_parts(value: Any, change: Change) -> Any:
    if isinstance(value, list):
        return [_in_parts(each, change) for each in value]
    if isinstance(value, dict):
        _, keys = visual_of(value)
        inner = {key: _parts_in_text(each) if key in _CONTENTS else each for key, each in value.items()}
        return {key: (_everywhere if key in keys else _in_parts)(each, change) for key, each in inner.items()}
    return value


def _parts_in_text(value: Any) -> Any:
    """Parse the parts of a turn that stand there as JSON text; anything else stays as it is."""
    with suppress(DataError):  # otherwise the run rejects this row
        return (parts_of_text(value, "content") or value) if isinstance(value, str) else value
    return value


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(type(value).__name__)


def _hash(url: str) -> str:
    return sha256(url.encode(errors="surrogatepass")).hexdigest()[:32]


def _downloaded(urls: Sequence[str], folder: Path, web: Web, parallel: int) -> Iterator[tuple[str, Path | str]]:
    """Download pictures, in the order of `urls`. Yields each URL with its file, or with the reason why there is none.
    Raises RunError if a file cannot be written."""
    done = failed = 0
    spoken = time.monotonic()
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="fetch")
    try:
        with web.client() as client:
            get = partial(_save, client, folder, web)
            left = iter(urls)
            waiting = deque(pool.submit(get, url) for url in islice(left, _AHEAD * parallel))
            for url in urls:
                found = waiting.popleft().result()
                waiting.extend(pool.submit(get, following) for following in islice(left, 1))
                done, failed = done + 1, failed + isinstance(found, str)
                if time.monotonic() - spoken > _SAY_SECONDS:
                    spoken = time.monotonic()
                    logger.info(f"{done:,} of {len(urls):,} pictures asked for, {failed:,} failed")
                yield url, found
    finally:
        pool.shutdown(cancel_futures=True)


def _save(client: httpx.Client, folder: Path, web: Web, url: str) -> Path | str:
    """Download a picture to its file; return that, or the reason why it failed."""
    try:
        data, ending = download(client, url, web)
    except DataError as error:
        return str(error)
    name = _hash(url)
    file = folder / name[:2] / f"{name}{ending}"
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(_PART)
        part.write_bytes(data)
        part.replace(file)
    return file
