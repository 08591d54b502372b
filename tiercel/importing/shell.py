"""Reading the commands of a shell script that launches training: comments, continued lines, quotes, variables, arrays,
arithmetic, and the few substitutions that only compute or handle paths. Nothing is executed, and no other file is read.

What only a shell could know, such as `$(nproc)`, stays as written, with its dollar sign.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from tiercel.importing.arithmetic import evaluated

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"(?P<count>#?)(?P<name>\w+)(?:\[(?P<index>\d+|@|\*)\])?(?:(?P<rule>:?[-=+])(?P<other>.*))?", re.DOTALL
)
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")
_HEREDOC = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)")
_REDIRECTED = re.compile(r"(?:\d?>>?|&>>?|<)(?:&\d)?")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w.-]*>")  # of documentation, such as <your_image_root>
_APART = " \t\n;|&()<>"
_ENDS = ("&&", "||", ";;", ";", "|", "&", "\n")
KEYWORDS = (
    "then",
    "do",
    "else",
    "elif",
    "if",
    "while",
    "until",
    "time",
    "!",
    "{",
    "}",
    "(",
    ")",
    "exec",
    "nohup",
    "sudo",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The words of one command, and the environment that the script gives it: exported variables, and assignments
    before the command's name."""

    words: tuple[str, ...]
    environment: dict[str, str]


def commands(script: str, file: Path | None = None) -> list[Command]:
    """Return every command of a script, in order. `file` is the script's file; LLaMA-Factory's YAML file stands for the
    command that takes it. Raises ValueError where a quote or a bracket is not closed, or substitutions are nested too
    deeply."""
    if file is not None and file.suffix in (".yaml", ".yml") and re.search(r"^stage *:", script, re.MULTILINE):
        return [Command(words=("llamafactory-cli", "train", str(file)), environment={})]
    try:
        return _Script(script, file).commands()
    except RecursionError as error:
        raise ValueError("substitutions are nested too deeply") from error


class _Script:
    """Read a script from left to right. Variables get the values that they have at that place."""

    def __init__(self, text: str, file: Path | None):
        self.text = re.sub(r"\\\r?\n", " ", text.replace("\r\n", "\n"))
        self.at = 0
        self.arrays: dict[str, list[str]] = {}  # every variable; a plain one is a list of one value
        self.exported: set[str] = set()
        self.folder = Path.cwd()
        if file is not None:
            self.arrays["BASH_SOURCE"] = [str(file)]
            self.arrays["0"] = [str(file)]

    @property
    def variables(self) -> dict[str, str]:
        return {name: values[0] for name, values in self.arrays.items() if values}

    def commands(self) -> list[Command]:
        found: list[Command] = []
        while self.at < len(self.text):
            command = self._finished(self._words())
            if command is not None:
                found.append(command)
        return found

    def _finished(self, words: list[str]) -> Command | None:
        """Make a command of its words. Assignments alone, `export` and `cd` only change the commands that follow."""
        while words and words[0] in KEYWORDS:
            words = words[1:]
        if words and words[0] in ("export", "declare", "local", "readonly", "typeset"):
            is_export = words[0] == "export"
            words = [word for word in words[1:] if not word.startswith("-")]
            for word in words:
                match = _ASSIGNMENT.fullmatch(word)
                if match:
                    self._assign(match)
                if is_export:
                    self.exported.add(match["name"] if match else word)
            return None
        leading = []
        while words and (words[0] == "env" or _ASSIGNMENT.fullmatch(words[0])):
            leading += [match] if (match := _ASSIGNMENT.fullmatch(words[0])) else []
            words = words[1:]
        if not words:
            for match in leading:
                self._assign(match)
            return None
        own = {match["name"]: match["value"] for match in leading}
        if words[0] == "cd" and len(words) == 2 and "$" not in words[1]:
            self.folder = Path(os.path.normpath(self.folder / words[1]))
        variables = self.variables
        exported = {name: variables[name] for name in sorted(self.exported) if name in variables}
        return Command(words=tuple(words), environment={**exported, **own})

    def _assign(self, match: re.Match[str]) -> None:
        before = self.variables.get(match["name"], "") if match["more"] else ""
        self.arrays[match["name"]] = [before + match["value"]]

    def _words(self) -> list[str]:
        """Read the words up to the end of the command."""
        words: list[str] = []
        while self.at < len(self.text):
            rest = self.text[self.at :]
            end = next((end for end in _ENDS if rest.startswith(end)), None)
            if _PLACEHOLDER.match(rest):
                words += self._word()
            elif heredoc := _HEREDOC.match(rest):
                self._skip_heredoc(heredoc)
            elif redirection := _REDIRECTED.match(rest):
                self.at += redirection.end()
                self._skip_blanks()
                if not redirection[0].endswith(("&1", "&2")):
                    self._word()
            elif end is not None:
                self.at += len(end)
                return words
            elif rest[0] in " \t":
                self.at += 1
            elif rest[0] == "#":
                self.at = (self.text + "\n").find("\n", self.at)
            elif array := re.match(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\(", rest):
                self.at += array.end()
                before = self.arrays.get(array["name"], []) if array["more"] else []
                self.arrays[array["name"]] = before + self._bracketed()
            elif rest[0] in "()":
                self.at += 1
                words.append(rest[0])
            else:
                words += self._word()
        return words

    def _bracketed(self) -> list[str]:
        """Read the words of an array, up to its closing bracket."""
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\n":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = (self.text + "\n").find("\n", self.at)
            elif self.text[self.at] in _APART:
                self.at += 1
            else:
                words += self._word()
        if self.at >= len(self.text):
            raise ValueError("a bracket is not closed")
        self.at += 1
        return words

    def _skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1

    def _skip_heredoc(self, match: re.Match[str]) -> None:
        end = re.compile(rf"^\s*{match['word']}\s*$", re.MULTILINE).search(self.text, self.at + match.end())
        self.at = len(self.text) if end is None else end.end()

    def _word(self) -> list[str]:
        """Read one word. An array, or a variable without quotes, may make it several words or none."""
        fields, is_any = [""], False
        while self.at < len(self.text):
            letter = self.text[self.at]
            if placeholder := _PLACEHOLDER.match(self.text, self.at):
                fields[-1] += placeholder[0]
                self.at, is_any = placeholder.end(), True
            elif letter in _APART:
                break
            elif letter == "'" or self.text.startswith("$'", self.at):
                start = self.at + (1 if letter == "'" else 2)
                end = self._found("'", start)
                fields[-1] += self.text[start:end]
                self.at, is_any = end + 1, True
            elif letter == '"':
                self.at += 1
                self._quoted(fields)
                is_any = True
            elif letter == "\\" and self.at + 1 < len(self.text):
                fields[-1] += self.text[self.at + 1]
                self.at, is_any = self.at + 2, True
            elif letter in "$`":
                values, is_known = self._expanded()
                split = [part for value in values for part in value.split()] if is_known else values
                _join(fields, split)
                is_any = is_any or bool(split)
            else:
                fields[-1] += letter
                self.at, is_any = self.at + 1, True
        return fields if is_any else []

    def _quoted(self, fields: list[str]) -> None:
        """Read the inside of double quotes into the word that is being read."""
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`'):
                fields[-1] += self.text[self.at + 1]
                self.at += 2
            elif letter in "$`":
                _join(fields, self._expanded()[0])
            else:
                fields[-1] += letter
                self.at += 1
        self._found('"', self.at)
        self.at += 1

    def _found(self, mark: str, start: int) -> int:
        place = self.text.find(mark, start)
        if place < 0:
            raise ValueError(f"a {mark} is not closed")
        return place

    def _expanded(self) -> tuple[list[str], bool]:
        """Return the value of the `$...` or backticks at this place and True, or the text as written and False."""
        start, rest = self.at, self.text[self.at :]
        if rest.startswith("$(("):
            self.at = self._closing(start + 1)
            found = evaluated(self._filled(self.text[start + 3 : self.at - 2]), self.variables)
            values = None if found is None else [str(found)]
        elif rest.startswith("$("):
            self.at = self._closing(start + 1)
            values = self._substituted(self.text[start + 2 : self.at - 1])
        elif rest[0] == "`":
            self.at = self._found("`", start + 1) + 1
            values = self._substituted(self.text[start + 1 : self.at - 1])
        elif rest.startswith("${"):
            self.at = self._closing(start + 1)
            values = self._parameter(self.text[start + 2 : self.at - 1])
        elif match := _VARIABLE_NAME.match(rest, 1):
            self.at += match.end()
            values = self.arrays.get(match[0])
            values = values[:1] if values else values
        else:
            self.at += min(2, len(rest))
            values = None
        if values is None:
            return [self.text[start : self.at]], False
        return values, not any("$" in value for value in values)

    def _closing(self, opening: int) -> int:
        """Return the place after the bracket that closes the one at `opening`; brackets in quotes do not count."""
        pair = {"(": ")", "{": "}"}[self.text[opening]]
        depth, quote = 0, ""
        for place in range(opening, len(self.text)):
            letter = self.text[place]
            if quote:
                quote = "" if letter == quote and self.text[place - 1] != "\\" else quote
            elif letter in "'\"" and pair == ")":
                quote = letter
            elif letter == self.text[opening]:
                depth += 1
            elif letter == pair:
                depth -= 1
                if depth == 0:
                    return place + 1
        raise ValueError(f"a {self.text[opening]} is not closed")

    def _parameter(self, inside: str) -> list[str] | None:
        """Return the value of `${inside}`; None where the script does not give it, or it cuts or replaces text."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            return None
        values = self.arrays.get(match["name"])
        if match["count"]:
            return None if values is None else [str(len(values))]
        if match["rule"] is not None:
            is_there = bool(values and (values[0] or not match["rule"].startswith(":")))
            if match["rule"].endswith("+"):
                return [self._filled(match["other"])] if is_there else [""]
            return values[:1] if values and is_there else [self._filled(match["other"])]
        if values is None or match["index"] in ("@", "*"):
            return values
        place = int(match["index"] or 0)
        return values[place : place + 1] or None

    def _filled(self, text: str) -> str:
        """Return the text with its variables replaced, as one word."""
        inner = _Script(f'"{text}"', None)
        inner.arrays, inner.folder = self.arrays, self.folder
        return " ".join(inner._word())

    def _substituted(self, inside: str) -> list[str] | None:
        """Return what a command prints that only computes or handles paths; None for any other."""
        inner = _Script(inside, None)
        inner.arrays, inner.folder = dict(self.arrays), self.folder
        words = [list(command.words) for command in inner.commands()]
        if not words or any("$" in word or "`" in word for line in words for word in line):
            return None
        if words[-1] == ["pwd"] and all(line[0] == "cd" for line in words[:-1]):
            return [str(inner.folder)]
        printed = PRINTED.get(words[0][0]) if len(words) == 1 else None
        text = None if printed is None else printed(words[0][1:], self.variables)
        return None if text is None else [text]


def _join(fields: list[str], values: list[str]) -> None:
    """Append the first value to the word that is being read; each further value begins a new word."""
    if values:
        fields[-1] += values[0]
        fields += values[1:]


def _expr(words: list[str], variables: Mapping[str, str]) -> str | None:
    value = evaluated(" ".join(words), {})
    return None if value is None else str(value)


PRINTED: dict[str, Callable[[list[str], Mapping[str, str]], str | None]] = {
    "expr": _expr,
    "echo": lambda words, _: " ".join(words),
    "dirname": lambda words, _: str(PurePath(words[0]).parent) if words else None,
    "basename": lambda words, _: PurePath(words[0]).name.removesuffix(words[1] if words[1:] else "") if words else None,
    "realpath": lambda words, _: os.path.abspath(words[0]) if words else None,
}


def quoted(words: tuple[str, ...]) -> str:
    """Join words in one line, quoted where they hold white space."""
    return " ".join(shlex.quote(word) if re.search(r"\s", word) or not word else word for word in words)
