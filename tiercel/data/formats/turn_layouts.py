"""Read layouts of turns that some data sets have of their own, before their format is read:

{"texts": [{"user": "What is it?", "assistant": "A cup."}]}    the_cauldron, Docmatix, FineVision
{"image": {"<image_00>": "a.png"}}    MiniCPM-V, with these marks in the turns
"""

import re
from collections.abc import Mapping
from typing import Any

from tiercel.data.formats.message_parts import CONTENT, IN_ORDER
from tiercel.data.record_values import given
from tiercel.data.texts import told
from tiercel.errors import DataError

_MARK = re.compile(r"<image_?\d+>")
_PAIR = {"user", "assistant"}


def has_pairs(record: Mapping[str, Any]) -> bool:
    """Return whether the turns of a record are `texts` of {"user", "assistant"}, as in the_cauldron, Docmatix and
    FineVision, and it has no other turns."""
    texts = record.get("texts")
    if any(given(record, key) for key in IN_ORDER) or not isinstance(texts, list) or not texts:
        return False
    return all(isinstance(each, Mapping) and _PAIR <= each.keys() <= _PAIR | {"source"} for each in texts)


def with_turns_of_pairs(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with such pairs as one conversation, in their order; any other record as it is."""
    if not has_pairs(record):
        return record
    turns = [{"role": role, "content": pair[role]} for pair in record["texts"] for role in ("user", "assistant")]
    return {**{key: value for key, value in record.items() if key != "texts"}, "messages": turns}


def with_pictures_by_mark(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record whose `image` names pictures by their marks in the turns, as MiniCPM-V has it, with <image> in
    place of each mark and the pictures in that order; any other record as it is. Raises DataError for a picture without
    a mark."""
    named = record.get("image")
    if not isinstance(named, Mapping) or not named or not all(map(_MARK.fullmatch, map(str, named))):
        return record
    files = {mark: file for mark, file in named.items() if file is not None}  # tables write null for other rows' marks
    shown: list[str] = []

    def placed(found: re.Match[str]) -> str:
        if found[0] not in files:
            return found[0]
        shown.append(found[0])
        return "<image>"

    def turn_of(turn: Any) -> Any:
        texts = {key: turn[key] for key in CONTENT if isinstance(turn.get(key), str)} if isinstance(turn, dict) else {}
        return {**turn, **{key: _MARK.sub(placed, text) for key, text in texts.items()}} if texts else turn

    turns = {key: [turn_of(turn) for turn in record[key]] for key in IN_ORDER if isinstance(record.get(key), list)}
    if unseen := [mark for mark in files if mark not in shown]:
        raise DataError(told("picture without a mark", unseen[0]), field="image")
    return {**record, **turns, "image": [files[mark] for mark in shown]}
