"""Counts, long values and errors in messages."""

import re


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, as in "1 row" and "1,024 rows". `plural` is needed if it is not the noun with an
    s."""
    return f"{count:,} " + (noun if count == 1 else plural or f"{noun}s")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


CUT = "..."  # marks the place where a message shows only part of a long value
LONGEST_PATH = 4096  # characters, which is the system's limit

_SPACE = re.compile(r"\s")
_NO_PATH = re.compile(r"^[\"']?data:|[\uff0c\u3002\uff1b\uff1a\uff01\uff1f]")  # in a word with a slash; Chinese marks
_QUOTATION = re.compile(r"(?<!\w)(?P<quote>[\"'])(?:\\.|(?!(?P=quote))[^\\])*(?P<end>(?P=quote)?)", re.DOTALL)


def brief(text: str, limit: int) -> str:
    """Cut a text after `limit` characters. A path is not cut, so the text may become longer, and a quotation is
    closed."""
    if len(text) <= limit:
        return text
    end = limit - len(CUT)
    word_end = _word_end(text, end)
    if word_end is not None:
        return text if word_end == len(text) else _closed(text[:word_end])
    kept = _closed(text[:end])
    return kept if len(kept) <= limit else _closed(text[: end - 1])


def _word_end(text: str, place: int) -> int | None:
    """Return the end of the word that continues at a place, if it may be a path, else None."""
    start = next((at + 1 for at in range(place - 1, max(-1, place - LONGEST_PATH), -1) if text[at].isspace()), 0)
    match = _SPACE.search(text, place, start + LONGEST_PATH)
    end = match.start() if match else len(text)
    word = text[start:end]
    is_path = "/" in word and len(word) <= LONGEST_PATH and _NO_PATH.search(word) is None
    return end if start < place and is_path else None


def _closed(text: str) -> str:
    *_, last = [None, *_QUOTATION.finditer(text)]
    return text + CUT + (last["quote"] if last is not None and not last["end"] else "")
