"""The messages of tiercel in the user's language.

Texts stay in the code as they are, in English. When one goes to the user, it passes through `translated`, which finds
the template that it was made from. The tables in zh/ map an English template to the Chinese one, with fields written as
`{0}`. No table is read if the language is English. A text without a template stays as it is.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

FOLDER = Path(__file__).parent
LANGUAGES = ("zh",)
ENGLISH = "en"
ASKED_FOR = ("TIERCEL_LANG", "LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides

FIELD = re.compile(r"\{\w+[!#]?\}")
ALSO_WORDS = "!"  # `{0!}` in a translation: a field that is translated even if it is a single word
NUMBER = "#"  # `{0#}`: a field that must be a number
_WORDS = re.compile(r"[A-Za-z]{2,}\W+[A-Za-z]{2,}")
_NUMBER = re.compile(r"[\d,.]+")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_LATIN = re.compile(r"[A-Za-z0-9`]")
_FULL_WIDTH = ("\uff0c", "\u3002", "\uff1b", "\uff1a", "\u3001", "\uff08", "\uff09")  # , . ; : enumeration ( )
_NAMES = re.compile(r"([^\s\"']+(?:, [^\s\"']+)*) (and|or) ([^\s\"']+)")  # in a field: names, or words of a recipe
_BETWEEN = {"and": "\u548c", "or": "\u6216"}
_SEPARATORS = {"; ": "\uff1b", ", ": "\uff0c"}
# The part before a problem: a key, a file, or a row's `file:line (id) field`.
_KEY = re.compile(r"(?P<key>[^\s\"'{\[(]+(?: \([^()]*\) [\w.\[\]]+)?): (?P<rest>.+)")


def language(environment: Mapping[str, str] = os.environ) -> str:
    """Return the language of the messages, "zh" or "en"."""
    asked = next((value for name in ASKED_FOR if (value := environment.get(name))), "")
    return next((each for each in LANGUAGES if asked.lower().startswith(each)), ENGLISH)


def translated(text: str, chosen: str | None = None) -> str:
    """Return the text in the given language, or else in the user's. A text that is not one message is translated line
    by line."""
    chosen = chosen or language()
    return text if chosen == ENGLISH else _Translator.of(chosen).text(text)


@cache
def table(chosen: str) -> Mapping[str, str]:
    """Read the messages of a language as a mapping from English to translated templates."""
    files = sorted((FOLDER / chosen).glob("*.json"))
    return {text: other for file in files for text, other in json.loads(file.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Translation:
    """A translation, and the number of letters of the text that the tables contain."""

    text: str
    known: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Template:
    """An English template, cut at its fields, and its translation."""

    pieces: tuple[str, ...]
    names: tuple[str, ...]
    other: str

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    def fields(self, text: str) -> dict[str, str] | None:
        """Return the values of the fields, or None if the text was not made from this template."""
        place = 0
        for piece in self.pieces:  # much faster than a regular expression, which rejects the same texts
            place = text.find(piece, place) + len(piece)
            if place < len(piece):
                return None
        pattern = "(.*?)".join(map(re.escape, self.pieces))
        match = re.fullmatch(pattern, text, re.DOTALL if "\n" in pattern else 0)
        return None if match is None else dict(zip(self.names, match.groups(), strict=True))


class _Translator:
    """The messages of a language. If a text can be read in several ways, the reading that covers most of it is used."""

    def __init__(self, messages: Mapping[str, str]):
        self._whole: dict[str, str] = {}
        self._templates: list[_Template] = []
        self._seen: dict[str, _Translation | None] = {}
        for text, other in messages.items():
            names = tuple(FIELD.findall(text))
            if names:
                pieces = tuple(FIELD.split(text.strip()))
                self._templates.append(_Template(pieces=pieces, names=names, other=other.strip()))
            else:
                self._whole[text.strip()] = other.strip()
        self._templates.sort(key=lambda template: -template.length)  # the first of equal readings is used

    @staticmethod
    @cache
    def of(chosen: str) -> "_Translator":
        return _Translator(table(chosen))

    def text(self, text: str) -> str:
        """Translate a message of one or more lines."""
        if "\n" in text and (found := self._message(text)) is not None:
            return found.text
        return "\n".join(self._line(line) for line in text.split("\n"))

    def _line(self, line: str) -> str:
        bare = line.strip()
        found, opening = self._phrase(bare), self._phrase(bare[:-1]) if bare.endswith(":") else None
        if opening is not None and (found is None or found.known <= opening.known):  # lines follow
            return line.replace(bare, f"{opening.text}\uff1a")
        return line if found is None else line.replace(bare, found.text)

    def _phrase(self, text: str) -> _Translation | None:
        """Translate a message, the part after `key: `, or the parts of a list."""
        if text not in self._seen:
            ways = [self._message(text), self._after_key(text), *(self._list(text, each) for each in _SEPARATORS)]
            self._seen[text] = max(filter(None, ways), key=lambda found: found.known, default=None)
        return self._seen[text]

    def _after_key(self, text: str) -> _Translation | None:
        match = _KEY.fullmatch(text)
        rest = None if match is None or " " not in match["rest"] else self._phrase(match["rest"])
        if match is None or rest is None:
            return None
        return _Translation(text=f"{match['key']}: {rest.text}", known=rest.known + 2)

    def _list(self, text: str, separator: str) -> _Translation | None:
        """Translate the parts of a list. Parts that are not messages are names or values. If one of these has several
        words, the whole list stays as it is. It also stays if only single words would be translated, because they may
        be keys."""
        parts = text.split(separator)
        found = [self._message(part.strip()) for part in parts] if len(parts) > 1 else []
        if None in found:
            found = [each if " " in part.strip() else None for each, part in zip(found, parts, strict=True)]
        told = [" " in part.strip() for each, part in zip(found, parts, strict=False) if each is not None]
        if not any(told) or any(each is None and _WORDS.search(part) for each, part in zip(found, parts, strict=True)):
            return None
        texts = [part if each is None else each.text for each, part in zip(found, parts, strict=True)]
        known = sum(each.known for each in found if each is not None)
        known += len(separator) * sum(one is not None and other is not None for one, other in pairwise(found))
        return _Translation(text=_SEPARATORS[separator].join(texts), known=known)

    def _message(self, text: str) -> _Translation | None:
        """Translate one message."""
        if (found := self._whole.get(text)) is not None:
            return _Translation(text=found, known=len(text))
        ways = [
            filled
            for template in self._templates
            if (fields := template.fields(text)) is not None
            if (filled := self._filled(template, fields)) is not None
        ]
        if text.startswith(("a ", "an ")) and (noun := self._message(text.partition(" ")[2])) is not None:
            ways.append(noun)
        return max(ways, key=lambda found: found.known, default=None)

    def _filled(self, template: _Template, fields: Mapping[str, str]) -> _Translation | None:
        """Put the fields into a template, and translate each that is a message itself."""
        text, *pieces = FIELD.split(template.other)
        known = template.length
        for name, piece in zip(FIELD.findall(template.other), pieces, strict=True):
            value = fields[name.replace(ALSO_WORDS, "").replace(NUMBER, "")]
            if NUMBER in name and not _NUMBER.fullmatch(value):
                return None
            if "\n" in value or text.endswith("\n"):  # lines, which keep their indentation
                meant = _Translation(text=self.text(value), known=0)
            else:
                is_told = " " in value.strip() or ALSO_WORDS in name  # other single words are names or values
                meant = (self._phrase(value.strip()) if is_told else None) or _Translation(text=_names(value), known=0)
            text = _joined(_joined(text, meant.text), piece)
            known += meant.known
        return _Translation(text=text, known=known)


def _names(value: str) -> str:
    """Return "a, b or c" in Chinese, and any other value as it is."""
    match = _NAMES.fullmatch(value)
    return value if match is None else f"{match[1]} {_BETWEEN[match[2]]} {match[3]}"


def _joined(left: str, right: str) -> str:
    """Join two pieces, with a space between Chinese and Latin letters."""
    if left.endswith(_FULL_WIDTH):
        return left + right.lstrip(" ")
    if _CHINESE.search(left.rstrip(" ")[-1:]) and _CHINESE.match(right.lstrip(" ")):
        return left.rstrip(" ") + right.lstrip(" ")
    ends, begins = left[-1:], right[:1]
    is_edge = (_CHINESE.match(ends) and _LATIN.match(begins)) or (_LATIN.match(ends) and _CHINESE.match(begins))
    return f"{left} {right}" if is_edge else f"{left}{right}"
