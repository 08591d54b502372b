"""Tell what is odd about rows that can be used: pictures, choices and thoughts in columns that no format reads, a
system turn that takes the place of data.system, files that are missing by their names, boxes that may be in other
coordinates."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiercel.config.data import Data
from tiercel.data.media.file_names import MediaKind, names_files
from tiercel.data.row_table import RowTable
from tiercel.data.rows import given_size
from tiercel.data.stores import RowView, view_of
from tiercel.data.texts import told
from tiercel.geometry import misfit
from tiercel.models.families.base import Family
from tiercel.rewards.answers import parse_boxes, parse_point
from tiercel.types import ImagePlan, Row

_LOOKED_AT = 32  # rows of a file, and files; to read all would take minutes
_MOST_FILES = 8  # whose columns are looked at, though they have pictures, which may be within the rows
_PART = re.compile(r"(.*)-\d{3,}-of-(\d{3,})(?:-[0-9a-f]+)?\.\w[\w.]*")
_TWO_CHARACTERS = re.compile(r"\\n(?![a-z])")  # as in a YAML text in single quotes; not LaTeX's \neq
_OF_PICTURES = re.compile(r"image|img|pic|photo", re.IGNORECASE)
_CHOICES = re.compile(r"(?:answer_?)?(?:options?|choices?|candidates?)(?:_?(?:list|texts?))?", re.IGNORECASE)
_CHOICE = re.compile(r"(?:(?:option|choice)[_ ]?)?[A-D]|(?:option|choice)[_ ]?[a-d1-4]")  # a column for each choice
_THOUGHT = re.compile(r"reasoning(?:_content)?|rationale|thoughts?|thinking|cot|chain_of_thought", re.IGNORECASE)
_NUMBERED = re.compile(r"(?:images?|img|pic(?:ture)?|photo)[_ -]?\d+", re.IGNORECASE)
_POINTED = re.compile(r"point|click|tap|coordinate|position|box_start|start_box", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_OF_A_PART = re.compile(r"(?:video|clip|segment)_(?:start|end)|(?:start|end)_frame", re.IGNORECASE)
_MOST = {"thousandths": 1000.0, "unit": 1.0}  # the largest coordinate of a family's space
_REGION = re.compile(r"\bbox|region|area|coordinate|located|object (?:at|in)", re.IGNORECASE)
_OF_QWEN = re.compile(r"<\|(?:box|object_ref|quad)_start\|>")
_SMALL, _MANY = 800, 12  # pixels of a side; rows
BEYOND = "beyond"  # a note that is not told: a box lies outside its picture if its numbers are pixels


def odd_lines(data: Data, table: RowTable, *, is_learnt: bool) -> list[str]:
    """Return a line for each file whose rows have no picture although one of their columns names pictures or videos,
    for further pictures and choices that the model will not see, for thoughts that are not learnt or not begun if
    answers are learnt, for frames without a rate, for each data set that is not complete, for data.system if rows have
    a system turn, which takes its place, and for texts of the recipe that seem to mean something else. Only the first
    rows are looked at, those of each file for its columns."""
    rows = view_of(table.rows)
    names, files, lines = rows.file_names, rows.files, []
    pictures = np.bincount(files, weights=rows.column("images") + rows.column("videos"), minlength=len(names))
    for number in np.flatnonzero(pictures == 0)[:_LOOKED_AT].tolist():
        first = _first(rows, np.flatnonzero(files == number))
        if (column := _picture_column(first)) is not None:
            lines.append(told("a picture in no column", names[number], column))
        elif (column := _column_of_files(first, "video")) is not None:
            lines.append(told("a video in no column", names[number], column))
    for number in np.flatnonzero(np.bincount(files))[:_MOST_FILES].tolist():
        first = _first(rows, np.flatnonzero(files == number))
        lines += [f"{names[number]}: {line}" for line in (*_odd_columns(first, is_learnt), *_odd_videos(first, data))]
    lines += _missing_parts(names)
    for key, text in (("system", data.system or ""), ("prompt", data.prompt or "")):
        if os.path.isfile(text):
            lines.append(told("a text that is a file", key, text))
        if _TWO_CHARACTERS.search(text):
            lines.append(told("a line end", key))
    if data.system is not None:
        first = _first(rows, np.arange(min(len(rows), _LOOKED_AT)))
        if own := sum(row.messages[0].role == "system" for row in first):
            lines.append(told("system turns", own, len(first)))
    return lines


def _odd_columns(rows: Sequence[Row], is_learnt: bool) -> Iterator[str]:
    yield from _further_pictures(rows)
    yield from _unseen_choices(rows)
    if is_learnt:
        yield from _unlearnt_thoughts(rows)
    for name in ("system", "system_prompt"):
        hidden = [row for row in rows if row.columns.get(name) and row.messages[0].role != "system"]
        if any(isinstance(row.columns[name], str) for row in hidden):
            yield told("a system column", name)


def _odd_videos(rows: Sequence[Row], data: Data) -> Iterator[str]:
    """Yield a line if videos are frames of which neither the row nor the recipe says the rate, and one if columns seem
    to name a part of a video."""
    found = sum(any(video.frames and video.fps is None for video in row.videos) for row in rows)
    if found and "fps" not in data.video.model_fields_set:
        yield told("frames without a rate", found, len(rows), data.video.fps)
    names = dict.fromkeys(name for row in rows if row.videos for name in row.columns if _OF_A_PART.fullmatch(name))
    if names:
        yield told("parts of videos", ", ".join(names))


def _unlearnt_thoughts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line if rows with answers to learn have thoughts in a column, and one if answers end a thought that they
    do not begin, as those do that were sampled with a template that writes <think> itself."""
    learnt = [
        (row, row.messages[-1].content)
        for row in rows
        if row.messages[-1].role == "assistant" and row.messages[-1].is_trained
    ]
    texts = [
        (name, value, answer)
        for row, answer in learnt
        for name, value in row.columns.items()
        if _THOUGHT.fullmatch(name) and isinstance(value, str) and value.strip()
    ]
    hidden = dict.fromkeys(name for name, value, answer in texts if value.strip() not in answer)
    if hidden:
        yield told("thoughts in a column", next(iter(hidden)))
    if unopened := sum("</think>" in answer.partition("<think>")[0] for _, answer in learnt):
        yield told("thoughts without a beginning", unopened, len(learnt))


def _further_pictures(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line if rows have one picture in a column that is read, and others in columns such as image_2."""
    seen = [row for row in rows if row.images]
    names = dict.fromkeys(name for row in seen for name in row.columns if _NUMBERED.fullmatch(name))
    further = [name for name in names if any(names_files(row.columns.get(name), "image") for row in seen)]
    if further:
        yield told("further pictures", ", ".join(further))


def _unseen_choices(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line if the answers to choose from stand in columns of their own and not in the questions, and one if
    right answers are the numbers of choices."""
    offered = [(row, choices) for row in rows if (choices := _choices(row.columns))]
    hidden = [(row, choices) for row, choices in offered if not _words(list(choices.values())) <= _asked(row)]
    if 2 * len(hidden) < len(offered) or not hidden:
        return
    names = list(hidden[0][1])
    yield told("unseen choices", ", ".join(names), "".join(rf"\n{{{name}}}" for name in names))
    counts = [(row.answer, len(next(iter(choices.values())))) for row, choices in hidden if len(choices) == 1]
    if counts and all(type(answer) is int and 0 <= answer <= count for answer, count in counts):
        yield told("numbers of choices", counts[0][0], names[0])


def _choices(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns with several answers to choose from: one with all of them, or one for each."""
    for name, value in columns.items():
        several = len(value) > 1 if isinstance(value, list | dict) else isinstance(value, str) and "," in value
        if several and _CHOICES.fullmatch(name):
            return {name: value}
    each = {name: value for name, value in columns.items() if _CHOICE.fullmatch(name) and value not in (None, "")}
    return each if len(each) > 1 else {}


def _words(value: Any) -> set[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*map(_words, value))
    return set(_WORD.findall(str(value).lower()))


def _asked(row: Row) -> set[str]:
    return set().union(*(_words(message.content) for message in row.messages if message.role != "assistant"))


def _missing_parts(names: Sequence[str]) -> list[str]:
    """Return a line for each data set that has fewer files than they say by names such as train-00000-of-00005."""
    folders = [Path(name) for name in names if Path(name).is_dir()]
    files = {str(file) for folder in folders for glob in ("*.*", "data/*.*") for file in folder.glob(glob)} | {*names}
    counts = sorted(Counter((match[1], int(match[2])) for match in map(_PART.fullmatch, files) if match).items())
    return [told("missing files", name, count, total) for (name, total), count in counts if count < total]


def _first(rows: RowView, places: np.ndarray) -> list[Row]:
    found = (rows.look(place) for place in places[:_LOOKED_AT].tolist())
    return [row for row in found if isinstance(row, Row)]


def _picture_column(rows: Sequence[Row]) -> str | None:
    """Return the first column all of whose values name pictures, or one of bytes that is called after pictures."""
    if (column := _column_of_files(rows, "image")) is not None:
        return column
    left_out = (name for row in rows for name, kind in row.left_out if kind == "bytes" and _OF_PICTURES.search(name))
    return next(left_out, None)


def _column_of_files(rows: Sequence[Row], kind: MediaKind) -> str | None:
    for name in dict.fromkeys(name for row in rows for name in row.columns):
        values = [row.columns[name] for row in rows if row.columns.get(name) is not None]
        if values and all(names_files(value, kind) for value in values):
            return name
    return None


def odd_boxes(row: Row, plans: Sequence[ImagePlan], family: Family, *, is_learnt: bool) -> Iterator[str]:
    """Yield what is odd about a row's boxes. Many data sets give the size of the picture on which they were drawn.
    Boxes that are numbers in an answer are learnt as they are, if the answer is, and so is the point of a click; boxes
    in a question are read as they are."""
    given = given_size(row.columns)
    has_boxes = bool(row.boxes) or (isinstance(row.answer, list | str) and bool(parse_boxes(str(row.answer))))
    if has_boxes and len(plans) == 1 and given not in (None, plans[0].original_size):
        yield told("the size of a picture")
    learnt = [each.content for each in row.messages if each.role == "assistant" and each.is_trained and is_learnt]
    if not family.name.startswith("qwen") and (found := next(filter(None, map(_OF_QWEN.search, learnt)), None)):
        yield told("tokens of another family", found[0], family.name)
    space, is_resized = family.coordinate_space, any(plan.original_size != plan.processed_size for plan in plans)
    if space is None or not plans:
        return
    asked = [each.content for each in row.messages if each.role == "user" and _REGION.search(each.content)]
    boxes = [box for text in learnt for box in parse_boxes(text)]
    points = [point for text in learnt if _POINTED.search(text) and (point := parse_point(text)) is not None]

    def may_be_wrong(places: Sequence[Sequence[float]]) -> bool:
        outside = max(map(max, places), default=0) > _MOST.get(space, math.inf)
        return bool(places) and (outside or (space not in _MOST and is_resized))

    if space != "unit" and any(map(_is_share, boxes)):
        yield told("boxes as fractions", family.name, space)
    elif may_be_wrong(boxes):
        yield told("boxes as numbers", family.name, space)
    elif may_be_wrong(points):
        yield told("points as numbers", family.name, space)
    elif space == "thousandths" and boxes and len(plans) == 1 and max(plans[0].original_size) <= _SMALL:
        fit = all(misfit(box, "pixels", plans[0].original_size) is None for box in boxes)
        yield told("boxes that may be pixels", family.name) if fit else BEYOND
    boxes = [box for text in asked for box in parse_boxes(text)]
    if may_be_wrong(boxes) or (space != "unit" and any(map(_is_share, boxes))):
        yield told("boxes in questions", family.name, space)


def _is_share(box: Sequence[float]) -> bool:
    """Return whether the numbers of a box are fractions of a picture's sides."""
    return min(box) >= 0 and max(box) <= 1 and any(side % 1 for side in box)


def settled(notes: Mapping[str, int], family: Family) -> dict[str, int]:
    """Return what is odd about rows, with their number. That boxes may be pixels is left out if one of them cannot be,
    or if they are few: in a picture of less than 1,000 pixels, half of all boxes in thousandths lie within it."""
    doubtful = told("boxes that may be pixels", family.name)
    is_left_out = BEYOND in notes or notes.get(doubtful, 0) < _MANY
    return {note: count for note, count in notes.items() if note != BEYOND and not (note == doubtful and is_left_out)}
