"""Names of secrets, and values as a message may show them: without what was given under such a name."""

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

SECRET_VARIABLES = ("*_KEY", "*TOKEN*", "*SECRET*", "*PASSWORD*")  # in either case
SHORTEST_SECRET = 8  # characters; a shorter value would occur in ordinary words
REDACTED = "[redacted]"
CREDENTIALS = re.compile(r'(?<=://)[^\s/?#"<>]+(?=@)')
PARAMETER = re.compile(r"(?<=[?&;])(?P<name>[\w.%-]+)=(?P<value>[^\s&;#\"'<>]+)")

_SECRET_NAMES = re.compile("|".join(map(fnmatch.translate, SECRET_VARIABLES)))
_SIGNING = ("SIGNATURE", "CREDENTIAL", "SIG")
_USER = re.compile(rf"{CREDENTIALS.pattern}@")
_SETTINGS = (
    re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)["']?\s*[=:]\s*(?P<first>\S)"""),
    re.compile(r"(?<!\S)-(?P<name>[\w.-]+)\s+(?P<first>\S)"),
)
_FLAG = re.compile(r"--?(?P<name>[\w.-]+)")


def is_secret_name(name: str) -> bool:
    """Return whether a variable, key or URL parameter of this name contains a secret. A tokenizer is not a token."""
    return _SECRET_NAMES.match(name.upper().replace("-", "_").replace("TOKENIZER", "")) is not None


def is_secret_parameter(name: str) -> bool:
    """Return whether a URL's parameter of this name contains a secret, also as a part of what signs the URL."""
    return is_secret_name(name) or name.upper().endswith(_SIGNING)


def without_credentials(text: str) -> str:
    """Remove users and passwords from the addresses in a text, and the values of parameters that are named like
    secrets."""
    if "://" not in text:
        return text
    return PARAMETER.sub(lambda found: f"{found['name']}=" if is_secret_parameter(found["name"]) else found[0],
                         _USER.sub("", text))  # fmt: skip


def harmless(value: Any, key: str = "") -> Any:
    """Copy what a user gave, for a message. The copy, at every depth, has no values of keys named like secrets, nothing
    that follows such a name in a text, and no credentials of addresses. `key` is the dotted name that the value was
    given for; leave it out if that cannot name a secret, such as a number of tokens."""
    if isinstance(value, dict):
        return {name: harmless(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [harmless(inner, key) for inner in value]
    if value is None or isinstance(value, bool) or _is_count(value):
        return value
    if _is_of_secret(key):
        return REDACTED
    return _harmless_text(value) if isinstance(value, str) else value


def harmless_words(words: Sequence[str]) -> list[str]:
    """Copy the words of a command line, without the value in `--hf_token VALUE` or `hf_token=VALUE`."""
    flags = [_FLAG.fullmatch(word) for word in words]
    before = ["", *(flag["name"] if flag else "" for flag in flags)]
    return [word if flag else harmless(word, name) for word, flag, name in zip(words, flags, before, strict=False)]


def _is_of_secret(key: str) -> bool:
    return any(part == "key" or is_secret_name(part) for part in key.split("."))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and len(str(value)) < SHORTEST_SECRET


def _harmless_text(text: str) -> str:
    for pattern in _SETTINGS:
        for found in pattern.finditer(text):
            rest = text[found.start("first") :]
            is_count = rest[0].isdigit() and len(rest) < SHORTEST_SECRET
            if _is_of_secret(found["name"]) and not is_count:
                text = text[: found.start("first")] + REDACTED
                break
    return CREDENTIALS.sub("redacted", text) if "://" in text else text
