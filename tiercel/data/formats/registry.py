"""List the formats of rows, with one entry for each; read records by them, and detect the format of a file."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from os.path import basename, splitext
from typing import Any

from tiercel.config.data import FormatName
from tiercel.data.formats.columns import VISUALS, foreign_columns, missing_numbers, require_plain, require_plain_value
from tiercel.data.formats.converters import (
    EXPRESSIONS,
    QUESTIONS,
    SEVERAL,
    VERL_ANSWER,
    from_alpaca,
    from_openai,
    from_qa,
    from_refcoco,
    from_sharegpt,
    from_swift,
    from_tiercel,
    from_trl,
    from_verl,
    from_vlm_r1,
)
from tiercel.data.formats.message_parts import has_openai_parts, with_visuals_of_parts
from tiercel.data.formats.preferences import SIDES, label_of, pair_in_text, without
from tiercel.data.records import Record
from tiercel.data.rows import (
    BOX_MARK,
    REFERENCE_MARK,
    Reading,
    RowDraft,
    answer_start,
    count_marks,
    finish,
    given,
    read_pixels,
    shortened,
    whole,
    with_turns_of_text,
)
from tiercel.errors import DataError
from tiercel.message_text import brief
from tiercel.reward_types import column
from tiercel.types import RejectedRow, Row

# All columns that some format reads. In every other column, a value that JSON does not know is left out.
# fmt: off
_READ = frozenset((
    "id", "messages", "conversations", "query", "response", "history", "system", "instruction", "input", "output",
    "prompt", "completion", "question", "problem", "chosen", "rejected", "rejected_response", "rejected_messages",
    "label", "kto_tag", "objects", "boxes", "box_images", "bbox", "file_name", "answer", "solution",
    "reward_model", "min_pixels", "max_pixels", "tools", "functions", "audio", "audios", "text",
    *EXPRESSIONS, *SEVERAL,
))
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFormat:
    """Describes one format. The texts are used in messages and in the table of docs/data.md."""

    convert: Callable[[Mapping[str, Any]], RowDraft]
    title: str  # as people call it, before "rows" and "format"
    rows: str
    marks: str  # the keys that distinguish it from other formats
    answer: str  # where the right answer comes from
    turns: tuple[str, ...] = ()  # the keys that may hold the turns; a row with none of these may be a plain question


_LAST_TURN = "the gpt turn that ends the conversation"
FORMATS: dict[FormatName, DataFormat] = {
    "tiercel": DataFormat(
        convert=from_tiercel,
        title="tiercel",
        rows="tiercel's own rows",
        marks="messages, with images, answer or boxes",
        answer="`answer`",
        turns=("messages",),
    ),
    "swift": DataFormat(
        convert=from_swift,
        title="ms-swift",
        rows="ms-swift's rows: the standard form with `messages`, or `query` and `response`",
        marks="messages with solution, label, objects or system; query, response",
        answer="`solution`, else `answer`, else `label`",
        turns=("messages", "query", "response", "history"),
    ),
    "vlm_r1": DataFormat(
        convert=from_vlm_r1,
        title="LLaVA and VLM-R1",
        rows="VLM-R1's and LLaVA's rows",
        marks="conversations, or problem with solution",
        answer=f"`solution`, else `answer`, else {_LAST_TURN}",
        turns=("conversations", "problem"),
    ),
    "sharegpt": DataFormat(
        convert=from_sharegpt,
        title="ShareGPT",
        rows="LLaMA-Factory's ShareGPT rows",
        marks="conversations with system, tools, chosen or kto_tag",
        answer=f"`solution`, else `answer`, else {_LAST_TURN}",
        turns=("conversations",),
    ),
    "alpaca": DataFormat(
        convert=from_alpaca,
        title="Alpaca",
        rows="LLaMA-Factory's Alpaca rows: instruction and input are the last question, output is its answer",
        marks="instruction with output or chosen",
        answer="`solution`, else `answer`, else `output`",
        turns=("instruction", "input", "output"),
    ),
    "openai": DataFormat(
        convert=from_openai,
        title="OpenAI",
        rows="OpenAI's messages, each picture where its part stands",
        marks="messages with image_url parts",
        answer="`answer`, else `solution`",
        turns=("messages",),
    ),
    "trl": DataFormat(
        convert=from_trl,
        title="TRL",
        rows="TRL's rows, each of prompt and answer as text or as turns",
        marks="prompt; chosen with rejected",
        answer="`answer`, else `solution`",
        turns=("prompt", "completion", "question"),
    ),
    "rlhf_v": DataFormat(
        convert=from_trl,
        title="RLHF-V",
        rows="RLHF-V's and RLAIF-V's pairs; also as JSON in `text`",
        marks="question with chosen and rejected, or such a text",
        answer="none",
    ),
    "qa": DataFormat(
        convert=from_qa,
        title="question and answer",
        rows="A question on pictures and its answer, as in Geometry3K: `question` or `problem`, with images",
        marks="question or problem, with answer",
        answer="`answer`, else `solution`; for SFT it is also the assistant turn",
    ),
    "verl": DataFormat(
        convert=from_verl,
        title="verl",
        rows="verl's rows: `prompt` as a list of turns",
        marks="prompt with reward_model",
        answer="`answer`, else `solution`, else `reward_model.ground_truth`; for SFT also the assistant turn",
    ),
    "refcoco": DataFormat(
        convert=from_refcoco,
        title="RefCOCO",
        rows="A referring expression and its box in COCO's [x, y, width, height]: the user turn is the expression, the "
        "assistant turn and the answer are the box as [x1, y1, x2, y2]",
        marks="bbox with expression, sentences or caption",
        answer="the box as [x1, y1, x2, y2]",
    ),
}


def expanded(format: FormatName, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a refcoco record with several expressions of one box into one record for each expression. Any other record
    is returned unchanged, in a list."""
    key = next((key for key in SEVERAL if given(record, key)), None)
    is_several = key is not None and isinstance(record[key], list) and bool(record[key])
    if format != "refcoco" or key is None or not is_several or given(record, "expression"):
        return [record]
    rest = {name: value for name, value in record.items() if name not in (key, "id")}
    records: list[Mapping[str, Any]] = []
    for number, each in enumerate(record[key]):
        text = each.get("sent") if isinstance(each, Mapping) else each
        id = {"id": f"{record['id']}#{number + 1}"} if given(record, "id") else {}
        records.append({**rest, **id, "expression": text})
    return records


def rows_of(record: Record, format: FormatName, reading: Reading) -> list[Row | RejectedRow]:
    """Convert a record to its rows: one, or for a refcoco record one for each expression."""
    default = default_id(reading.file, record.line, reading.stem)
    if record.problem is not None:
        reason = record.problem
        return [RejectedRow(id=default, file=reading.file, line=record.line, field="row", reason=reason)]
    values = expanded(format, record.value)
    names = [default] if len(values) == 1 else [f"{default}#{number}" for number in range(1, len(values) + 1)]
    parse = partial(parse_record, format=format, line=record.line, reading=reading, is_plain=record.is_plain)
    return [parse(value, default=name) for value, name in zip(values, names, strict=True)]


def parse_record(
    record: Mapping[str, Any],
    *,
    format: FormatName,
    line: int,
    reading: Reading,
    default: str | None = None,
    is_plain: bool = False,
) -> Row | RejectedRow:
    """Convert a record to a Row, or to a RejectedRow with the wrong field and the reason. `default` is the id if the
    row has none. Values that JSON cannot hold are not looked for with `is_plain`."""
    file = reading.file
    id = default or default_id(file, line, reading.stem)
    try:
        missing = {} if is_plain else missing_numbers(record)
        left_out = {} if is_plain else missing | foreign_columns(record, _READ)
        id = id if reading.ids == "line" else _read_id(without(record, *missing), id)
        record = with_visuals_of_parts(with_turns_of_text(without(record, *left_out)))
        if not is_plain:
            require_plain(record)

        draft_of = partial(convert, format)

        def row_of(draft: RowDraft) -> Row:
            row = finish(draft, reading, id=id, line=line, pixels=read_pixels(record))
            kept = {"id": record["id"]} if reading.ids == "line" and given(record, "id") else {}
            if not kept and not left_out:
                return row
            return replace(row, columns={**kept, **row.columns}, left_out=tuple(left_out.items()))

        if reading.purpose == "labels":
            label, unlabelled = label_of(record)
            return replace(row_of(draft_of(unlabelled)), label=label)
        if reading.purpose == "pairs":
            return paired(*map(row_of, split_shared_turns(*map(draft_of, SIDES[format](record)))))
        return row_of(draft_of(record))
    except DataError as error:
        field, reason = shortened(error.field), shortened(str(error))
        return RejectedRow(id=id, file=file, line=line, field=field, reason=reason)
    except RecursionError:  # from a message that quotes the wrong value
        return RejectedRow(id=id, file=file, line=line, field="row", reason="is nested too deeply")


def split_shared_turns(chosen: RowDraft, rejected: RowDraft) -> tuple[RowDraft, RowDraft]:
    """Divide the boxes and references that a pair lists once for both answers, as ms-swift does: first come those of
    the question, then those of the chosen answer, then those of the rejected one. Lists that fit each side alone
    stay."""
    asked = [answer_start(side.messages) for side in (chosen, rejected)]
    if chosen.messages[: asked[0]] != rejected.messages[: asked[1]]:
        return chosen, rejected

    def parts(mark: str, listed: int) -> tuple[slice, slice] | None:
        """Return the slices of a list for both sides that belong to the question and to the rejected answer; None if
        its length does not fit the marks."""
        of_question = count_marks(chosen.messages[: asked[0]], mark)
        first, second = (count_marks(side.messages, mark) - of_question for side in (chosen, rejected))
        if listed != of_question + first + second:
            return None
        return slice(of_question), slice(of_question + first, None)

    if (found := parts(BOX_MARK, len(chosen.boxes))) is not None:
        both, own = found
        last = own.start
        boxes, images = rejected.boxes, rejected.box_images
        rejected = replace(rejected, boxes=boxes[both] + boxes[own], box_images=images[both] + images[own])
        chosen = replace(chosen, boxes=boxes[:last], box_images=images[:last])
    if (found := parts(REFERENCE_MARK, len(chosen.references))) is not None:
        both, own = found
        names = rejected.references
        rejected = replace(rejected, references=names[both] + names[own])
        chosen = replace(chosen, references=names[: own.start])
    return chosen, rejected


def paired(chosen: Row, rejected: Row) -> Row:
    """Make the row of a pair. Raises DataError if both sides are equal."""
    sides = [(side.messages, side.boxes, side.box_images, side.visuals) for side in (chosen, rejected)]
    if sides[0] == sides[1]:
        raise DataError("both answers are the same, so there is nothing to prefer", field="rejected")
    return replace(chosen, rejected=replace(rejected, columns=chosen.columns))


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
    # Rows that have only messages and images mean the same in tiercel's format and in ms-swift's.
    if not found and any(given(record, "messages") for record in records):
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
    raise DataError(
        f"{file}: its rows {verdict}. Keys found: {keys}. Known formats: {known}. Set data.format.{meant}",
        field="format",
    )


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
    elif _is_qa(has):
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


def _is_qa(has: Set[str]) -> bool:
    """Return whether the keys are those of a question and its answer, and of no other format."""
    others = {"conversations", "instruction", "bbox"}
    return "answer" in has and bool(has & {"question", "problem"}) and not has & others


def convert(format: FormatName, record: Mapping[str, Any]) -> RowDraft:
    """Read a record from a file of that format."""
    return from_qa(record) if _is_plain_question(format, record) else FORMATS[format].convert(record)


def _is_plain_question(format: FormatName, record: Mapping[str, Any]) -> bool:
    """Return whether a record has none of the keys that its file's format reads, but a question with an answer. It is
    then read as a question and its answer."""
    keys = FORMATS[format].turns
    is_answered = given(record, "answer") or column(record, VERL_ANSWER) is not None
    return bool(keys) and not any(given(record, key) for key in keys) and is_answered and _has_question(record)


def _has_question(record: Mapping[str, Any]) -> bool:
    return any(given(record, key) for key in QUESTIONS)


def _read_id(record: Mapping[str, Any], default: str) -> str:
    id = record.get("id")
    if id is None:
        return default
    id = whole(id)
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f"is {brief(repr(id), 80)}, but an id must be text or an integer", field="id")
    require_plain_value(id, "id", 0)
    return str(id)
