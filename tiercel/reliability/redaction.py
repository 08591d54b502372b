"""Removal of secrets from everything that is written: values of variables named like secrets, and credentials in URLs.

A secret is replaced by `[redacted NAME]` in text, and by `redacted` in a URL, which stays a valid URL.
"""

import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

from tiercel.message_text import CUT
from tiercel.secret_names import CREDENTIALS, PARAMETER, SHORTEST_SECRET, is_secret_name, is_secret_parameter

_SHORTEST_LINE = 16  # characters, of a line of a secret that has several, such as a private key

_PASSWORDS = re.compile(r'(?<=://)[^\s/?#"<>:]*:[^\s/?#"<>]+(?=@)')
_LEVELS = 3  # how often a written form may have been written again, such as JSON within a repr
_CUT_CREDENTIALS = re.compile(r'(?<=://)[^\s/?#"<>@:]*:(?!\d*\.\.\.)[^\s/?#"<>@]*?(?=\.\.\.)')
_MARKS = re.compile(r"\[redacted \w+\]|://redacted@|[?&;][\w.%-]+=redacted\b")


def secret_values(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secret values with the name of the variable of each, the longest value first. Secrets are the values
    of variables named like secrets, and passwords in URLs of any variable."""
    found: dict[str, str] = {}
    for name in sorted(environment):
        for part in _secret_parts(name, environment[name]):
            if len(part) >= SHORTEST_SECRET:
                found.setdefault(part, name)
    return dict(sorted(found.items(), key=lambda pair: len(pair[0]), reverse=True))


def _secret_parts(name: str, value: str) -> Iterator[str]:
    # A path that exists only tells where a secret is, and is a part of many other paths.
    if is_secret_name(name) and not (value.startswith(os.sep) and os.path.exists(value)):
        lines = [line.strip() for line in value.strip().split("\n")]
        yield value.strip()
        yield from (line for line in lines if len(lines) > 1 and len(line) >= _SHORTEST_LINE)
    for found in CREDENTIALS.finditer(value):
        password = found[0].partition(":")[2]
        yield from (password, unquote(password))
    for found in PARAMETER.finditer(value):
        if is_secret_parameter(found["name"]):
            yield from (found["value"], unquote(found["value"]))


class Redactor:
    """Replaces the secrets of an environment, and the credentials of any URL."""

    def __init__(self, environment: Mapping[str, str]):
        self._names = {
            form: name for value, name in reversed(secret_values(environment).items()) for form in _forms(value)
        }
        # Text that is already redacted stays as it is, even if a secret is a part of a mark.
        done = {f"[redacted {name}]" for name in self._names.values()}
        words = [*done, *sorted(self._names, key=len, reverse=True)]
        self._pattern = re.compile("|".join(map(re.escape, words)))

    def redact(self, text: str) -> str:
        """Return the text without secrets. Applying it a second time changes nothing."""
        if "://" in text:
            text = _CUT_CREDENTIALS.sub("redacted", CREDENTIALS.sub("redacted", text))
        if "=" in text:
            text = PARAMETER.sub(_redacted_parameter, text)
        return self._without_values(text)

    def redact_answer(self, text: str) -> str:
        """Return what the policy may see of an answer from the user's code: the text without the environment's secrets
        and without passwords in URLs. Everything else stays, even `?page_token=3`, because the policy may need it."""
        return self._without_values(_PASSWORDS.sub("redacted", text) if "://" in text else text)

    def _without_values(self, text: str) -> str:
        if any(form in text for form in self._names):
            text = self._pattern.sub(lambda found: self._replacement(found[0]), text)
        *cut, rest = text.split(CUT)
        return CUT.join([*map(self._without_beginning, cut), rest])

    def _without_beginning(self, text: str) -> str:
        """Return the text without the beginning of a secret at its end, if the text was cut."""
        if len(text) < SHORTEST_SECRET:
            return text
        for form, name in self._names.items():
            start = text.find(form[:SHORTEST_SECRET], max(0, len(text) - len(form)))
            if start >= 0 and form.startswith(text[start:]):
                return f"{text[:start]}[redacted {name}]"
        return text

    def _replacement(self, word: str) -> str:
        return f"[redacted {self._names[word]}]" if word in self._names else word


def redact(text: str) -> str:
    """Return the text without the secrets of this process's environment."""
    return _process_redactor().redact(text)


def without_secrets(pieces: Sequence[str]) -> list[str]:
    """Return the pieces of a text, or only empty pieces if the joined text contains a secret."""
    text = "".join(pieces)
    return list(pieces) if redact(text) == text else ["" for _ in pieces]


def redact_values(value: Any) -> Any:
    """Copy a tree of dicts, lists and tuples without the secrets of this process's environment. Keys and numbers
    stay."""
    return _with_texts(value, _process_redactor().redact)


def redact_answer(text: str) -> str:
    """Return an answer of the user's code without the secrets of this process's environment, as Redactor does."""
    return _process_redactor().redact_answer(text)


def redact_answers(value: Any) -> Any:
    """Copy a tree of answers of the user's code, redacted like `redact_answer`."""
    return _with_texts(value, _process_redactor().redact_answer)


def is_redacted(text: str) -> bool:
    """Return whether something was removed from the text."""
    return _MARKS.search(text) is not None


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_texts(item, change) for item in value)
    return value


def _process_redactor() -> Redactor:
    return _cached_redactor(
        tuple((name, value) for name, value in os.environ.items() if is_secret_name(name) or "://" in value)
    )


@lru_cache(maxsize=4)
def _cached_redactor(variables: tuple[tuple[str, str], ...]) -> Redactor:
    return Redactor(dict(variables))


def _forms(value: str) -> set[str]:
    """Return the forms that a value may have in text: as it is, in a URL, in Python's repr (alone and together with
    both kinds of quotes), in JSON, and in combinations of these, such as JSON in the repr of a dict."""
    forms = {value, quote(value, safe="", errors="surrogateescape")}
    for _ in range(_LEVELS):
        forms |= {written for form in forms for written in _written(form)}
    return forms


def _written(text: str) -> tuple[str, ...]:
    in_json = (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return (repr(text)[1:-1], repr(text + "'\"")[1:-4], *in_json)


def _redacted_parameter(found: re.Match[str]) -> str:
    return f"{found['name']}=redacted" if is_secret_parameter(found["name"]) else found[0]


def redact_tracebacks() -> None:
    """Print every traceback that ends this process or one of its threads without secrets from now on."""
    sys.excepthook = _print_traceback
    threading.excepthook = _print_thread_traceback


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="", flush=True)


def _print_thread_traceback(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = ended.thread.name if ended.thread is not None else "unknown"
    print(f"Exception in thread {name}:", file=sys.stderr)
    _print_traceback(ended.exc_type, ended.exc_value, ended.exc_traceback)
