"""Read the rows that a recipe names, for training and held out. Rows that cannot be used are rejected and recorded."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, chain, compress
from pathlib import Path

import numpy as np

from tiercel.config.data import Data, FormatName, HeldOut
from tiercel.config.row_sources import RowSource, names_in
from tiercel.data.formats.columns import VISUALS
from tiercel.data.formats.registry import FORMATS, distinct_stems, rows_of
from tiercel.data.index import remembered
from tiercel.data.order import chosen
from tiercel.data.readers import files_of, labelled_columns
from tiercel.data.record_values import shortened
from tiercel.data.records import Record
from tiercel.data.rejected_rows import first_reasons
from tiercel.data.remote import parts_of, source_of
from tiercel.data.row_files import RowFile, begun, make_indexes, open_index, row_file, telling_unreadable
from tiercel.data.row_table import RowTable, RunRows
from tiercel.data.rows import Reading, reject
from tiercel.data.stores import MemoryStore, RowView, joined, repeated_ids, view_of
from tiercel.data.texts import told
from tiercel.data.turns import Purpose
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.message_text import counted
from tiercel.types import RejectedRow, Row

MOST_HELD_BYTES = 1 << 25  # of a .jsonl file whose rows are held in memory; a larger one is indexed


def read_run_rows(config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RunRows:
    """Read the training rows and the held-out rows. Raises what `read_rows` raises."""
    rows = _rows_of_training(config, purpose, beat)
    for given, own in heldout_source(config).values():
        return replace(rows, heldout=read_rows(given, own, purpose, beat))
    return rows


def read_training_rows(config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RowTable:
    """Read the rows of data.train and data.mix, without those that are held out. Raises what `read_rows` raises."""
    return _rows_of_training(config, purpose, beat).train


def read_heldout_rows(config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RowTable | None:
    """Read the rows of data.eval; None if the recipe has none. Raises what `read_rows` raises."""
    for given, own in heldout_source(config).values():
        return read_rows(given, own, purpose, beat)
    return None if config.eval is None else _rows_of_training(config, purpose, beat).heldout


def _rows_of_training(config: Data, purpose: Purpose, beat: Callable[[], None]) -> RunRows:
    """Read the rows of data.train and data.mix, and hold out those that data.eval takes from them."""
    table, *others = [read_rows(given, own, purpose, beat) for given, own in sources_of(config).values()]
    if others:
        tables, weights = [table, *others], (1.0, *(more.weight for more in config.mix))
        table = replace(_side_by_side(tables, ", ".join(each.file for each in tables)), weights=weights)
    return (
        hold_out(table, config.eval, beat) if isinstance(config.eval, HeldOut) else RunRows(train=table, heldout=None)
    )


def hold_out(table: RowTable, held: HeldOut, beat: Callable[[], None]) -> RunRows:
    """Divide a table into training rows and held-out rows, by the ids of its usable rows. Raises DataError if no row
    would be held out, or if no row of a file would be left."""
    given = f"fraction {held.fraction:g}" if held.fraction is not None else f"count {held.count}"
    count = held.count if held.fraction is None else round(held.fraction * len(table.rows))
    assert count is not None  # the recipe was checked for it
    rows = view_of(table.rows)

    def choose() -> list[int]:
        return chosen(rows.files, rows.column("line"), rows.ids(), count, "held out").tolist()

    places = np.array(remembered(rows, f"heldout:{count}", choose, beat), np.int64)
    if not len(places):
        of = counted(len(rows), "usable training row")
        raise DataError(f"data.eval: {given} of {of} is 0 rows; use {{count: 1}}")
    counts = []
    for end, size in zip(accumulate(table.counts), table.counts, strict=True):
        counts.append(size - int(np.sum((places >= end - size) & (places < end))))
        if not counts[-1]:
            file = table.rows[end - 1].file
            raise DataError(told("no row left", given, file, size))
    heldout = rows.subset(places)
    name, own_counts = f"held out of {table.file}", (len(heldout),)
    return RunRows(
        train=replace(table, rows=rows.subset(np.delete(np.arange(len(rows)), places)), counts=tuple(counts)),
        heldout=RowTable(file=name, format=table.format, rows=heldout, rejected=(), counts=own_counts),
    )


Sources = dict[str, tuple[str | Sequence[str], Data]]  # what each key names, and how these rows are read


def heldout_source(config: Data) -> Sources:
    """Return what data.eval names; empty if it names nothing."""
    return {} if config.eval is None or isinstance(config.eval, HeldOut) else {"data.eval": (config.eval, config)}


def sources_of(config: Data) -> Sources:
    """Return what each key names that names training rows."""
    found: Sources = {"data.train": (config.train, config)}
    for number, more in enumerate(config.mix):
        own = {
            "format": more.format or config.format,
            "image_root": more.image_root or config.image_root,
            "boxes": more.boxes or config.boxes,
            "columns": config.columns if more.columns is None else more.columns,
        }
        found[f"data.mix.{number}.path"] = (more.path, config.model_copy(update=own))
    return found


def read_rows(
    given: str | Path | Sequence[str], config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None
) -> RowTable:
    """Read all rows of a file or data set, in its order, or of a pattern's files, in the order of their names; with #N,
    N of them; or those of several such names, in their order. `beat` is called for each row.

    Raises DataError if a file is missing, empty, of no known format, without a usable row, or has fewer rows than N,
    and EnvironmentProblem if a package is missing. Rejected rows do not raise: record them with `write_bad_rows`, then
    call `require_few_bad`.
    """
    names = names_in(given)
    sources = [source_of(name) for name in names]
    parts = [parts_of(source, config, beat) for source in sources]
    is_large = _is_large([*chain(*parts)])  # together; many small shards do not fit in memory either
    stems = distinct_stems(part.name for part in chain(*parts))
    describe = partial(row_file, config=config, purpose=purpose, is_large=is_large)

    def read(source: RowSource, files: Sequence[RowSource]) -> RowTable:
        if not files:
            raise DataError(f"{source.name}: no file matches this pattern")
        if len(files) == 1:
            return _table_of(describe(replace(files[0], count=source.count), stems[files[0].name]), config, beat)
        files = _with_rows(files)
        described = _each_as_others(files, lambda file, **how: describe(file, stems[file.name], **how), config)
        if is_large:
            make_indexes(files, described, source.name, config, beat)
        every = [_table_of(described(file), config, beat, is_whole=False) for file in files]
        table = _joined(every, source.name)
        _require_usable(table, purpose)
        if source.count is None:
            return table
        rows, rejected = _part(view_of(table.rows), table.rejected, source.count, source.name)
        return replace(table, rows=rows, rejected=tuple(rejected), counts=(len(rows),))

    tables = [read(source, files) for source, files in zip(sources, parts, strict=True)]
    return _joined(tables, ", ".join(names))


def _with_rows(files: Sequence[RowSource]) -> list[RowSource]:
    """Leave out the files of a pattern that are empty, as writers in parallel leave some, unless all are."""
    is_empty = [os.path.isfile(file.path) and os.path.getsize(file.path) == 0 for file in files]
    if all(is_empty):
        return list(files[:1])
    for file in compress(files, is_empty):
        logger.warning(f"{file.name}: the file is empty and is left out")
    return [file for file, is_out in zip(files, is_empty, strict=True) if not is_out]


def _each_as_others(
    files: Sequence[RowSource], describe: Callable[..., RowFile], config: Data
) -> Callable[[RowSource], RowFile]:
    """Return a function that describes a file of a pattern. If its rows have no known layout, it is read as the others
    are, which rejects these rows and no others."""

    @cache
    def as_others() -> Data:
        for file in files:
            with suppress(DataError):
                return config.model_copy(update={"format": describe(file).format})
        return config

    def described(file: RowSource) -> RowFile:
        try:
            return describe(file)
        except DataError as error:
            if error.field != "format":
                raise
            return describe(file, config=as_others())

    return described


def _side_by_side(tables: Sequence[RowTable], name: str) -> RowTable:
    """Put tables one after another; each keeps its own count."""
    return RowTable(
        file=name,
        format=", ".join(dict.fromkeys(table.format for table in tables)),
        rows=joined([view_of(table.rows) for table in tables]),
        rejected=tuple(row for table in tables for row in table.rejected),
        counts=tuple(len(table.rows) for table in tables),
        without=tuple(each for table in tables for each in table.without),
        labelled=tuple(dict.fromkeys(each for table in tables for each in table.labelled)),
    )


def _joined(tables: Sequence[RowTable], name: str) -> RowTable:
    """Join the tables of several files to one. Ids must differ among them, as within a file."""
    if len(tables) == 1:
        return replace(tables[0], file=name)
    table = _side_by_side(tables, name)
    rows, rejected = view_of(table.rows), list(table.rejected)
    repeated = repeated_ids(rows)
    for number, first in repeated.items():
        row, other = rows[number], rows[first]
        reason = told("repeated id of files", shortened(row.id), other.line, other.file)
        rejected.append(reject(row, DataError(reason, field="id")))
    if repeated:
        rows = rows.subset(np.delete(np.arange(len(rows)), list(repeated)))
    return replace(table, rows=rows, rejected=tuple(rejected), counts=(len(rows),))


def _is_large(parts: Sequence[RowSource]) -> bool:
    """Return whether the files of sources are too large to be held in memory."""
    try:
        files = [file for part in parts for file in files_of(part)]
        return sum(file.stat().st_size for file in files) >= MOST_HELD_BYTES
    except OSError:  # told when the file is read
        return False


def _table_of(read: RowFile, config: Data, beat: Callable[[], None], *, is_whole: bool = True) -> RowTable:
    """Read the rows of one file, directory or data set. One that is not the whole of a source may have none that can be
    used."""
    source, file = read.source, read.source.name
    with telling_unreadable(file):
        found = None if read.indexed is None else open_index(read.indexed, config, beat)
        if found is None:
            _, records, without = read.first or begun(source, config)
            usable, rejected = _parsed(records, read.format, read.reading, beat)
            rows = RowView([MemoryStore(file, usable)])
        else:
            rows, rejected, without = RowView([found.store]), list(found.rejected), Counter(dict(found.without))
    if source.count is not None:
        rows, rejected = _part(rows, rejected, source.count, file)
    table = RowTable(
        file=file,
        format=FORMATS[read.format].title,
        rows=rows,
        rejected=tuple(rejected),
        counts=(len(rows),),
        without=tuple(without.items()),
        labelled=labelled_columns(source),
    )
    if is_whole:
        _require_usable(table, read.reading.purpose)
    if rows:
        _require_pictures(rows, without, config.columns, file)
    return table


def _require_usable(table: RowTable, purpose: Purpose) -> None:
    if not table.rows:
        raise DataError(
            f"{table.file}: none of its rows ({len(table.rejected):,}) can be used as {table.format} rows for "
            f"{purpose}:\n{first_reasons(table.rejected)}"
        )


def _require_pictures(rows: RowView, without: Mapping[str, int], names: Mapping[str, str], file: str) -> None:
    """Raise DataError if data.columns names a column of pictures or videos that no row has. The first rows may have
    none, if questions with and without pictures follow each other."""
    absent = [name for name, given in names.items() if name in VISUALS and without.get(given, 0) >= len(rows)]
    if absent and not any(rows.column(kind).any() for kind in ("images", "videos")):
        name = absent[0]
        raise DataError(f"{file}: data.columns.{name} is {names[name]}, but no row has this column", field="columns")


def _part(rows: RowView, rejected: Sequence[RejectedRow], count: int, file: str) -> tuple[RowView, list[RejectedRow]]:
    """Take `count` of a file's rows, usable or not, so that the fraction of rejected rows stays about the same. Raises
    DataError if there are fewer rows."""
    usable, total = len(rows), len(rows) + len(rejected)
    require_count(count, total, file)

    def choose() -> list[int]:
        names = {name: place for place, name in enumerate(rows.file_names)}
        files = np.append(rows.files, np.array([names[row.file] for row in rejected], np.uint16))
        lines = np.append(rows.column("line"), np.array([row.line for row in rejected], np.uint64))
        return chosen(files, lines, chain(rows.ids(), (row.id for row in rejected)), count, "part of a file").tolist()

    places = np.array(remembered(rows, f"part:{count}", choose), np.int64)
    return rows.subset(places[places < usable]), [rejected[place - usable] for place in places[places >= usable]]


def require_count(count: int, total: int, file: str) -> None:
    """Raise DataError if a file has fewer rows than are selected of it."""
    if count > total:
        raise DataError(f"{file}#{count}: the file has only {counted(total, 'row')}; use a smaller number")


def _parsed(
    records: Iterable[Record], format: FormatName, reading: Reading, beat: Callable[[], None]
) -> tuple[list[Row], list[RejectedRow]]:
    rows: list[Row] = []
    rejected: list[RejectedRow] = []
    line_of_id: dict[str, int] = {}
    for record in records:
        beat()
        for row in rows_of(record, format, reading):
            if isinstance(row, RejectedRow):
                rejected.append(row)
            elif row.id in line_of_id:
                reason = told("repeated id", shortened(row.id), line_of_id[row.id])
                rejected.append(reject(row, DataError(reason, field="id")))
            else:
                line_of_id[row.id] = row.line
                rows.append(row)
    return rows, rejected
