"""Read turns whose parts bring their own pictures and videos, as Qwen, transformers and OpenAI write them:

{"type": "image", "image": "a.png"}    or `url` or `path` in place of `image`; the same for video
{"type": "image_url", "image_url": {"url": "a.png"}}
{"type": "input_image", "image_url": "a.png"}
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tiercel.data.formats.visuals import read_image, read_video
from tiercel.data.media.file_names import visual_of
from tiercel.data.rows import given, parts_of_text
from tiercel.errors import DataError

_IN_ORDER = ("messages", "conversations", "prompt", "question", "problem", "completion", "chosen")
_REPEATING = ("rejected_messages", "rejected")  # these may have the turns of the question once more
_CONTENT = ("content", "value")
OPENAI_PARTS = ("image_url", "input_image")


def has_openai_parts(messages: Any) -> bool:
    """Return whether any turn has a picture as OpenAI writes it."""
    return any(part.get("type") in OPENAI_PARTS for _, part in _parts(messages, "messages"))


def with_visuals_of_parts(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record with the pictures and videos that its parts bring in the columns `images` and `videos`, and
    {"type": "image"} in place of each. Raises DataError if one cannot be read, if the record has such a column too,
    and if two answers of a pair bring different ones."""
    turns = {key: record[key] for key in (*_IN_ORDER, *_REPEATING) if isinstance(record.get(key), list)}
    found = {key: brought for key, value in turns.items() if (brought := list(_visuals(value, key)))}
    if not found:
        return record
    every = [each for key in _IN_ORDER for each in found.get(key, ())]
    for key in _REPEATING:
        if found.get(key, every) != every:
            raise DataError(
                "brings other pictures or videos than the question; list all of them in `images`", field=key
            )
    changed = {**record, **{key: [_bare(turn) for turn in value] for key, value in turns.items()}}
    for kind in ("image", "video"):
        brought = [value for of, value in every if of == kind]
        column = next((name for name in (kind, f"{kind}s") if given(record, name)), None)
        if brought and column is not None and record[column] not in (brought, *brought):
            raise DataError(f"is a column of {kind}s, but the parts of turns bring their own; keep one", field=column)
        changed |= {f"{kind}s": brought} if brought and column is None else {}
    return changed


def _visuals(turns: list[Any], field: str) -> Iterator[tuple[str, Any]]:
    """Yield what kind of thing a part of turns shows, and where it lies."""
    for place, part in _parts(turns, field):
        kind, keys = visual_of(part)
        key = next((key for key in keys if given(part, key)), None)
        if key is None:
            if part.get("type") in OPENAI_PARTS:
                raise DataError('has no address, but must be {"url": ...}', field=place)
            continue
        value = part[key]
        if isinstance(value, Mapping) and set(value) <= {"url", "detail"}:
            value = value.get("url")
        {"image": read_image, "video": read_video}[kind](value, place)  # so that an error names the part
        yield kind, value


def _parts(turns: Any, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of turns that are objects, each after its place."""
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        for key in _CONTENT if isinstance(turn, Mapping) else ():
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
    contents = {key: _listed(turn.get(key), key) for key in _CONTENT}
    return {**turn, **{key: [_bare_part(part) for part in parts] for key, parts in contents.items() if parts}}


def _bare_part(part: Any) -> Any:
    shown, keys = visual_of(part) if isinstance(part, Mapping) else ("", ())
    if not any(given(part, key) for key in keys):
        return part
    return {"type": shown, **{key: value for key, value in part.items() if key not in ("type", *keys)}}
