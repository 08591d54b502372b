"""Columns of pictures in tables, read without the bytes of the pictures: an index needs only to know that these are
there, and they are nearly all of a file. A picture is an object of `bytes` and `path`, as datasets stores it."""

from collections.abc import Collection, Mapping
from typing import Any

UNREAD = b"(not read)"  # in place of the bytes of a picture
_NAMES = ("images", "image", "rejected_images")


def picture_columns(column_names: Mapping[str, str]) -> frozenset[str]:
    """Return the names of columns that pictures may stand in, with those that data.columns gives."""
    return frozenset(_NAMES) | {given for name, given in column_names.items() if name in _NAMES}


def leaves_without_bytes(table: Any, group: int, names: Collection[str]) -> tuple[list[str] | None, list[str]]:
    """Return the paths of the leaves that are left of a row group without the bytes of pictures, None if all of them
    are, and the columns that these bytes belong to: those of `names` in which every picture has bytes. `table` is a
    ParquetFile of pyarrow."""
    if not names:
        return None, []
    described = table.metadata.row_group(group)
    leaves = {leaf.path_in_schema: leaf for leaf in map(described.column, range(described.num_columns))}
    left_out: dict[str, str] = {}
    for name in _columns_of_pictures(table.schema_arrow, names):
        of_bytes = next(path for path in leaves if path.startswith(f"{name}.") and path.endswith(".bytes"))
        counts = leaves[of_bytes].statistics
        if counts is not None and counts.has_null_count:
            of_paths = of_bytes.removesuffix("bytes") + "path"
            paths = table.read_row_group(group, columns=[of_paths], use_threads=False).column(name)
            if counts.null_count == _places_without_picture(paths):
                left_out[name] = of_bytes
    left = [path for path in leaves if path not in left_out.values()]
    return left if left_out else None, list(left_out)


def batch_without_bytes(batch: Any, names: Collection[str]) -> tuple[Any, list[str]]:
    """Do the same for an Arrow batch, whose columns are in memory or mapped: return the batch that is left, and the
    columns that the bytes belong to."""
    import pyarrow
    from pyarrow import compute

    if not (found := _columns_of_pictures(batch.schema, names)):
        return batch, []
    columns, left_out = dict(zip(batch.schema.names, batch.columns, strict=True)), []
    for name in found:
        is_list = not pyarrow.types.is_struct(columns[name].type)
        pictures = compute.list_flatten(columns[name]) if is_list else columns[name]
        if compute.struct_field(pictures, "bytes").null_count == pictures.null_count:
            only_path = pyarrow.struct([each for each in pictures.type if each.name != "bytes"])
            columns[name] = columns[name].cast(pyarrow.list_(only_path) if is_list else only_path)
            left_out.append(name)
    fields = [batch.schema.field(name).with_type(column.type) for name, column in columns.items()]
    schema = pyarrow.schema(fields, metadata=batch.schema.metadata)
    return pyarrow.RecordBatch.from_arrays(list(columns.values()), schema=schema), left_out


def with_unread(row: dict[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Put UNREAD in place of the bytes that were left out of these columns of a row."""
    return {**row, **{name: _with_unread(row[name]) for name in left_out}}


def _with_unread(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_unread(each) for each in value]
    return None if value is None else {"bytes": UNREAD, **value}


def _columns_of_pictures(schema: Any, names: Collection[str]) -> list[str]:
    """List those of `names` that hold pictures. A name that other columns have or begin with could mean these too."""
    alone = [name for name in names if sum(f"{other}.".startswith(f"{name}.") for other in schema.names) == 1]
    return [name for name in alone if name in schema.names and _is_of_pictures(schema.field(name).type)]


def _is_of_pictures(kind: Any) -> bool:
    """Return whether a column of this type holds a picture, or a list of them, in each row."""
    from pyarrow import types

    kind = kind.value_type if types.is_list(kind) else kind
    if not types.is_struct(kind) or {each.name for each in kind} != {"bytes", "path"}:
        return False
    return types.is_binary(kind["bytes"].type) or types.is_large_binary(kind["bytes"].type)


def _places_without_picture(column: Any) -> int:
    """Count the places where a column has no picture: a null is one place, and so is an empty list."""
    import pyarrow
    from pyarrow import compute

    if pyarrow.types.is_struct(column.type):
        return int(column.null_count)
    # Without constants, for which pyarrow would import pandas.
    filled = compute.sum(compute.list_value_length(column).cast("bool")).as_py() or 0
    return len(column) - int(filled) + int(compute.list_flatten(column).null_count)
