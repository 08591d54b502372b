"""Read turns whose parts bring their own pictures and videos, as Qwen, transformers and OpenAI write them:

{"type": "image", "image": "a.png"}    or `url`, `path` or `base64` in place of `image`
{"type": "video", "video": "a.mp4", "fps": 2}    or `url` or `path` in place of `video`, or a list of frames, whose
                                                 rate qwen-vl-utils calls `sample_fps`
{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "..."}}    as Anthropic writes it
{"type": "image_url", "image_url": {"url": "a.png"}}
{"type": "input_image", "image_url": "a.png"}

{"type": "image", "index": 0} has no address: it says again which of the row's pictures it is.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from tiercel.data.formats.visuals import read_image, read_video
from tiercel.data.media.file_names import visual_of
from tiercel.data.record_values import given
from tiercel.data.texts import told
from tiercel.data.turns import parts_of_text
from tiercel.errors import DataError

IN_ORDER = ("messages", "conversations", "prompt", "question", "problem", "completion", "chosen")
_ANSWERS = ("completion", "chosen")  # these may repeat the turns of the question
_REPEATING = ("rejected_messages", "rejected")  # likewise
CONTENT = ("content", "value")
_BEFORE_PARTS = frozenset("[ \t\r\n\v\f")  # what a list of parts as JSON text may begin with
OPENAI_PARTS = ("image_url", "input_image")


def has_openai_parts(messages: Any) -> bool:
    """Return whether any turn has a picture as OpenAI writes it."""
    return any(part.get("type") in OPENAI_PARTS for _, part in _parts(messages, "messages"))


def with_visuals_of_parts(record: Mapping[str, Any], unread: Container[str] = ()) -> Mapping[str, Any]:
    """Return a record with the pictures and videos that its parts bring in the columns `images` and `videos`, and
    {"type": "image"} in place of each; the columns `unread` stay as they are. If the rejected side of a pair brings
    others, these are in `rejected_images` and `rejected_videos`. Raises DataError if one cannot be read, if the record
    has other ones in such a column, and if an answer alone brings others than its question."""
    keys = [key for key in (*IN_ORDER, *_REPEATING) if key not in unread]
    turns = {key: record[key] for key in keys if isinstance(record.get(key), list)}
    if not any(_may_have_parts(turn) for value in turns.values() for turn in value):
        return record  # as a rule, and a tenth of the time that a row takes
    found = {key: brought for key, value in turns.items() if (brought := list(_visuals(value, key)))}
    is_numbered = _require_in_order(turns)
    if not found and not is_numbered:
        return record
    every: list[tuple[str, Any]] = []
    for key in IN_ORDER:
        brought = found.get(key, [])
        is_whole = key in _ANSWERS and _is_conversation(turns.get(key, ())) and brought[: len(every)] == every
        every = brought if is_whole else [*every, *brought]
    changed = {**record, **{key: [_bare(turn) for turn in value] for key, value in turns.items()}}
    changed |= _columns(record, every, "")
    for key in _REPEATING:
        if (brought := found.get(key, every)) == every:
            continue
        if not _is_conversation(turns[key]):
            raise DataError(told("pictures of a side"), field=key)
        changed |= {"rejected_images": [], "rejected_videos": [], **_columns(record, brought, "rejected_")}
    return changed


def _require_in_order(turns: Mapping[str, list[Any]]) -> bool:
    """Return whether parts say which picture of the row they are. Raises DataError if one says another number than its
    place, which alone counts."""
    is_numbered, number = False, 0
    for field, value in turns.items():
        number = 0 if _is_conversation(value) else number
        for place, part in _parts(value, field):
            if visual_of(part)[0] != "image":
                continue
            if given(part, "index") and part["index"] != number:
                raise DataError(told("index of a picture", part["index"], number), field=place)
            is_numbered, number = is_numbered or given(part, "index"), number + 1
    return is_numbered


def _may_have_parts(turn: Any) -> bool:
    if not isinstance(turn, dict | Mapping):  # the first is quick
        return False
    contents = turn.get("content"), turn.get("value")
    return any([isinstance(each, list) or (isinstance(each, str) and each[:1] in _BEFORE_PARTS) for each in contents])


def _is_conversation(turns: Sequence[Any]) -> bool:
    """Return whether turns begin with a question, and are not only an answer."""
    return bool(turns) and isinstance(turns[0], dict | Mapping) and turns[0].get("role") in ("system", "user")


def _columns(record: Mapping[str, Any], visuals: Sequence[tuple[str, Any]], side: str) -> dict[str, Any]:
    """Return the columns of pictures and videos that parts bring, unless the record's own columns have the same."""
    columns = {}
    for kind in ("image", "video"):
        brought = [value for of, value in visuals if of == kind]
        own = next((name for name in (f"{side}{kind}", f"{side}{kind}s") if given(record, name)), None)
        if brought and own is not None and record[own] not in (brought, *brought):
            raise DataError(f"is a column of {kind}s, but the parts of turns bring their own; keep one", field=own)
        if brought:
            columns[own or f"{side}{kind}s"] = brought if own is None else record[own]
    return columns


def _visuals(turns: list[Any], field: str) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the address of each picture or video in the parts of turns."""
    for place, part in _parts(turns, field):
        kind, keys = visual_of(part)
        addresses = [key for key in keys if given(part, key)]
        if len(addresses) > 1:
            raise DataError(f"has several addresses, {' and '.join(addresses)}; keep one", field=place)
        if not addresses:
            if part.get("type") in OPENAI_PARTS:
                raise DataError('has no address, but must be {"url": ...}', field=place)
            continue
        value = part[addresses[0]]
        if addresses[0] == "source":
            value = _of_source(value)
        elif isinstance(value, Mapping) and set(value) <= {"url", "detail"}:
            value = value.get("url")
        elif kind == "video" and (rate := _rate_key(part, value)) is not None:
            value = {"frames" if isinstance(value, list) else "path": value, "fps": part[rate]}
        {"image": read_image, "video": read_video}[kind](value, place)  # so that an error names the part
        yield kind, value


def _rate_key(part: Mapping[str, Any], value: Any) -> str | None:
    """Return the key of a video's part that says how many frames a second has; None if it does not say it."""
    if isinstance(value, Mapping):
        return None
    keys = ("fps", "sample_fps") if isinstance(value, list) else ("fps",)
    return next((key for key in keys if given(part, key)), None)


def _of_source(source: Any) -> Any:
    """Return the picture of a source as Anthropic writes it: base64 text, or the address of a file."""
    if not isinstance(source, Mapping) or not {"type", *source} <= {"type", "media_type", "data", "url"}:
        return source
    if given(source, "url") or not given(source, "data"):
        return source.get("url")
    return f"data:{source.get('media_type') or ''};base64,{source['data']}"


def _parts(turns: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of turns that are objects, each after its place."""
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        for key in CONTENT if isinstance(turn, Mapping) else ():
            place = f"{field}[{number}].{key}"
            for index, part in enumerate(_listed(turn.get(key), place)):
                if isinstance(part, Mapping) and isinstance(part.get("type"), str):
                    yield f"{place}[{index}]", part


def _listed(content: Any, field: str) -> list[Any]:
    if isinstance(content, str):
        return parts_of_text(content, field) or []
    return content if isinstance(content, list) else []


def _bare(turn: Any) -> Any:
    """Return a turn without what its parts bring."""
    if not isinstance(turn, Mapping):
        return turn
    contents = {key: _listed(turn.get(key), key) for key in CONTENT}
    return {**turn, **{key: [_bare_part(part) for part in parts] for key, parts in contents.items() if parts}}


def _bare_part(part: Any) -> Any:
    shown, keys = visual_of(part) if isinstance(part, Mapping) else ("", ())
    brought = [part[key] for key in keys if given(part, key)]
    if shown == "image":
        part = {key: value for key, value in part.items() if key != "index"}
    if not brought:
        return part
    rate = _rate_key(part, brought[0]) if shown == "video" else None
    read = ("type", rate, *keys)
    return {"type": shown, **{key: value for key, value in part.items() if key not in read}}
