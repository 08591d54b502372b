"""Columns of rows under the names that the formats read, as data.columns says."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiercel.data.readers import Record
from tiercel.errors import DataError
from tiercel.samples import column

_MOST_NAMED = 20  # columns in a message


def named(record: Record, columns: Mapping[str, str]) -> Record:
    """Copy a record with columns under other names. `columns`: the row's name by the new one. What a row does not have
    stays as it is; a value from within a column stays there too."""
    found = {name: value for name, given in columns.items() if (value := column(record.value, given)) is not None}
    moved = {columns[name] for name in found}
    kept = {key: value for key, value in record.value.items() if key not in moved}
    return replace(record, value={**kept, **found})


def lacking(record: Record, columns: Mapping[str, str]) -> list[str]:
    """List the columns that data.columns names and a row does not have."""
    return [given for given in columns.values() if column(record.value, given) is None]


def require_columns(records: Sequence[Record], columns: Mapping[str, str], file: str) -> None:
    """Raise DataError where no row has a column that data.columns names, or one is named for two."""
    for name, given in columns.items():
        if others := [other for other in columns if other != name and columns[other] == given]:
            raise DataError(
                f"{file}: data.columns: {name} and {others[0]} both name {given}; name a column of its own for each",
                field="columns",
            )
    for name, given in columns.items():
        if any(given in record.value or column(record.value, given) is not None for record in records):
            continue
        there = list(dict.fromkeys(key for record in records for key in record.value))
        turned = f"; where {name} is the name in the file, write {{{given}: {name}}}" if name in there else ""
        raise DataError(
            f"{file}: data.columns.{name} names {given}, which no row has{turned}; columns there: "
            f"{', '.join(there[:_MOST_NAMED])}",
            field="columns",
        )
