"""List the formats of rows, with one entry for each; read records by them, and detect the format of a file."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from os.path import basename, splitext
from typing import Any

from tiercel.config.data import FormatName
from tiercel.data.formats.columns import VISUALS, foreign_columns, missing_numbers, require_plain, require_plain_value
from tiercel.data.formats.converters import CONVERTERS, EXPRESSIONS, QUESTIONS, SEVERAL, VERL_ANSWER, from_qa
from tiercel.data.formats.message_parts import has_openai_parts, with_visuals_of_parts
from tiercel.data.formats.preferences import (
    SIDES,
    label_of,
    no_pairs,
    pair_in_text,
    paired,
    split_shared_turns,
    without,
)
from tiercel.data.formats.turn_layouts import has_pairs, with_pictures_by_mark, with_turns_of_pairs
from tiercel.data.record_values import given, shortened, whole
from tiercel.data.records import Record
from tiercel.data.rows import Reading, RowDraft, finish, read_pixels
from tiercel.data.texts import told
from tiercel.data.turns import with_turns_of_text
from tiercel.errors import DataError
from tiercel.message_text import brief
from tiercel.reward_types import column
from tiercel.tables import table_rows
from tiercel.types import RejectedRow, Row

# All columns that some format reads. In every other column, a value that JSON does not know is left out.
# fmt: off
_READ = frozenset((
    "id", "messages", "conversations", "query", "response", "history", "system", "instruction", "input", "output",
    "prompt", "completion", "question", "problem", "chosen", "rejected", "rejected_response", "rejected_messages",
    "label", "kto_tag", "objects", "boxes", "box_images", "bbox", "file_name", "answer", "solution",
    "reward_model", "min_pixels", "max_pixels", "tools", "functions", "audio", "audios", "text", "texts",
    *EXPRESSIONS, *SEVERAL,
))
# fmt: on


_BOXES = {"bbox": "refcoco", "boxes": "tiercel", "box_images": "tiercel", "objects": "swift"}  # which format reads each
_CONVERSATIONS = ("messages", "conversations")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFormat:
    """Describes one format, as the table formats.txt explains."""

    convert: Callable[[Mapping[str, Any]], RowDraft]
    title: str
    rows: str
    marks: str
    answer: str
    turns: tuple[str, ...]


def _formats() -> Iterator[tuple[FormatName, DataFormat]]:
    """Yield the formats of the table, with their converters."""
    texts = {name: rest for name, *rest in table_rows("tiercel.data.formats", "formats.txt")}
    for name, convert in CONVERTERS.items():
        title, rows, marks, answer, turns = texts[name]
        keys = tuple(turns.split(", ")) if turns else ()
        yield name, DataFormat(convert=convert, title=title, rows=rows, marks=marks, answer=answer, turns=keys)


FORMATS = dict(_formats())


def expanded(format: FormatName, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a refcoco record with several expressions of one box into one record for each expression. Any other record
    is returned unchanged, in a list."""
    if format != "refcoco" or given(record, "expression"):
        return [record]
    key = next((key for key in SEVERAL if given(record, key)), None)
    if key is None or not isinstance(record[key], list) or not record[key]:
        return [record]
    rest = {name: value for name, value in record.items() if name not in (key, "id")}
    records: list[Mapping[str, Any]] = []
    for number, each in enumerate(record[key]):
        text = each.get("sent") if isinstance(each, Mapping) else each
        id = {"id": f"{record['id']}#{number + 1}"} if given(record, "id") else {}
        records.append({**rest, **id, "expression": text})
    return records


def rows_of(record: Record, format: FormatName, reading: Reading) -> list[Row | RejectedRow]:
    """Convert a record to its rows: one, or for a refcoco record one for each expression. What cannot be used becomes a
    RejectedRow with the wrong field and the reason."""
    default = default_id(reading.file, record.line, reading.stem)
    if record.problem is not None:
        reason = record.problem
        return [RejectedRow(id=default, file=reading.file, line=record.line, field="row", reason=reason)]
    values = expanded(format, record.value)
    names = [default] if len(values) == 1 else [f"{default}#{number}" for number in range(1, len(values) + 1)]
    return [_row_of(value, name, record, format, reading) for value, name in zip(values, names, strict=True)]


def _row_of(
    value: Mapping[str, Any], id: str, record: Record, format: FormatName, reading: Reading
) -> Row | RejectedRow:
    """Convert a value of a record. `id` is that of a row that has none."""
    line, is_plain = record.line, record.is_plain
    unread = _unread(format, next((name for name in _CONVERSATIONS if given(value, name)), None))
    try:
        value = with_pictures_by_mark(with_turns_of_pairs(value))
        missing = {} if is_plain else missing_numbers(value)
        left_out = {} if is_plain else missing | foreign_columns(value, _READ - unread)
        id = id if reading.ids == "line" else _read_id(without(value, *missing), id)
        value = with_visuals_of_parts(with_turns_of_text(without(value, *left_out)), unread)
        if not is_plain:
            require_plain(value)

        draft_of = partial(convert, format)

        def finished(draft: RowDraft) -> Row:
            row = finish(draft, reading, id=id, line=line, pixels=read_pixels(value))
            kept = {"id": value["id"]} if reading.ids == "line" and given(value, "id") else {}
            if not kept and not left_out:
                return row
            return replace(row, columns={**kept, **row.columns}, left_out=tuple(left_out.items()))

        if reading.purpose == "labels":
            label, unlabelled = label_of(value)
            return replace(finished(draft_of(unlabelled)), label=label)
        if reading.purpose == "pairs":
            return paired(*map(finished, split_shared_turns(*map(draft_of, SIDES.get(format, no_pairs)(value)))))
        return finished(draft_of(value))
    except DataError as error:
        field, reason = shortened(error.field), shortened(str(error))
    except RecursionError:  # from a message that quotes the wrong value
        field, reason = "row", "is nested too deeply"
    return RejectedRow(id=id, file=reading.file, line=line, field=field, reason=reason)


@cache
def _unread(format: FormatName, conversation: str | None) -> frozenset[str]:
    """Return columns that only other formats read, and those of questions beside a conversation that is read."""
    others = {name for name, reader in _BOXES.items() if reader != format}
    if conversation in FORMATS[format].turns:
        others |= {*_CONVERSATIONS, *QUESTIONS} - {conversation}
    return frozenset(others)


def default_id(file: str, line: int, stem: str | None = None) -> str:
    """Return the id of a row that has none: file name and line."""
    name = stem or splitext(basename(file))[0]
    if not name.isascii():
        name = name.encode(errors="backslashreplace").decode()  # the name of a file need not be UTF-8
    return f"{name}:{line}"


def distinct_stems(files: Iterable[str]) -> dict[str, str]:
    """Choose for each file what the ids of rows without ids begin with: its name, as if it were the only file, or if an
    earlier file has the same, with as many of its folders as it takes to tell them apart."""
    found: dict[str, str] = {}
    taken = set[str]()
    for file in dict.fromkeys(files):
        *folders, last = splitext(file)[0].split("/")
        names = ("/".join((*folders[len(folders) - count :], last)) for count in range(len(folders) + 1))
        found[file] = next((name for name in names if name not in taken), file)
        taken.add(found[file])
    return found


def detect_format(records: Sequence[Mapping[str, Any]], file: str) -> FormatName:
    """Detect the format of a file from the keys of its first records. Raises DataError if no format fits, or several
    do."""
    found = set[FormatName]()
    for record in records:
        with suppress(DataError):  # it is rejected when it is read
            found |= _formats_of(record)
    # Rows that have only messages, or pairs, and images mean the same in tiercel's format and in ms-swift's.
    if not found and any(given(record, "messages") or has_pairs(record) for record in records):
        return "tiercel"
    if found == {"sharegpt", "vlm_r1"} and not any(given(record, "problem") for record in records):
        return "sharegpt"  # whose system column may be empty in some rows
    if len(found) == 1:
        return found.pop()
    names = sorted({key for record in records for key in record})
    keys, known_keys = ", ".join(names) or "none", sorted(_READ | {*VISUALS})
    others = [key for key in names if key not in known_keys]
    near = [(each, key) for key in others for each in get_close_matches(key, known_keys, 1, 0.8)]
    meant = "".join(f" If {key} means {each}, set data.columns: {{{each}: {key}}}." for each, key in near)
    known = "; ".join(f"{name} ({each.marks})" for name, each in FORMATS.items())
    verdict = f"could have the format {' or '.join(sorted(found))}" if found else "do not match any known format"
    raise DataError(told("unknown format", file, verdict, keys, known, meant), field="format")


def _formats_of(record: Mapping[str, Any]) -> set[FormatName]:
    """Return the formats that fit a record's keys."""
    has = {key for key in record if given(record, key)}
    found = set[FormatName]()
    if "messages" in has and has_openai_parts(record["messages"]):
        found.add("openai")
    elif "messages" in has:
        if has & {"objects", "solution", "label", "system", "rejected_response", "rejected_messages"}:
            found.add("swift")
        # If there are an answer and a solution, ms-swift would read the solution, and tiercel the answer.
        if has & {"boxes", "rejected"} or {"answer", "solution"} <= has:
            found.add("tiercel")
    elif has & {"query", "response"}:
        found.add("swift")
    elif {"question", "chosen", "rejected"} <= has or pair_in_text(record) is not None:
        found.add("rlhf_v")
    elif {"prompt", "reward_model"} <= has:
        found.add("verl")
    elif not has & {"conversations", "instruction"} and ("prompt" in has or {"chosen", "rejected"} <= has):
        found.add("trl")
    elif "answer" in has and has & {"question", "problem"} and not has & {"conversations", "instruction", "bbox"}:
        found.add("qa")
    if "conversations" in has and has & {"system", "tools", "chosen", "kto_tag"}:
        found.add("sharegpt")
    elif "conversations" in has or ({"problem", "solution"} <= has and "messages" not in has):
        found.add("vlm_r1")
    if "instruction" in has and has & {"output", "chosen"} and "messages" not in has:
        found.add("alpaca")
    if "bbox" in has and has & {*EXPRESSIONS, *SEVERAL} and not has & {"messages", "conversations", "problem"}:
        found.add("refcoco")
    return found


def convert(format: FormatName, record: Mapping[str, Any]) -> RowDraft:
    """Read a record from a file of that format. One that has none of the keys that may hold the turns, but a question
    with an answer, is read as these."""
    keys = FORMATS[format].turns
    is_answered = given(record, "answer") or column(record, VERL_ANSWER) is not None
    is_question = is_answered and any(given(record, key) for key in QUESTIONS)
    is_plain = is_question and bool(keys) and not any(given(record, key) for key in keys)
    return from_qa(record) if is_plain else FORMATS[format].convert(record)


def _read_id(record: Mapping[str, Any], default: str) -> str:
    id = record.get("id")
    if id is None:
        return default
    id = whole(id)
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f"is {brief(repr(id), 80)}, but an id must be text or an integer", field="id")
    require_plain_value(id, "id", 0)
    return str(id)
