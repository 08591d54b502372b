"""Read the commands of a shell script that launches training: comments, continued lines, quotes, variables, arrays,
arithmetic, and the few substitutions that only compute or handle paths. Nothing is executed, and no other file is read.

What only a shell could know, such as `$(nproc)`, stays as written, with its dollar sign.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path, PurePath

from tiercel.convert.arithmetic import evaluated
from tiercel.convert.python_scripts import words_of_script

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_ARRAY = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\(")
_PARAMETER = re.compile(
    r"(?P<count>#?)(?P<name>\w+)(?:\[(?P<index>\d+|@|\*)\])?(?:(?P<rule>:?[-=+])(?P<other>.*))?", re.DOTALL
)
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_HEREDOC = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)")
_REDIRECTED = re.compile(r"(?:\d?>>?|&>>?|<)(?P<stream>&\d)?[ \t]*")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w.-]*>")  # in documentation, such as <your_image_root>
_END = re.compile(r"&&|\|\||;;|[;|&\n]")
_GAP = re.compile(r"[ \t]+|#[^\n]*")
_GAP_OF_ARRAY = re.compile(r"[ \t\n;|&(<>]+|#[^\n]*")
# Brackets, by the one that opens, and what quotes contain inside ( ).
_NESTED = {"(": re.compile(r"(['\"])(?:.*?(?<!\\)\1|.*)|[()]", re.DOTALL), "{": re.compile(r"[{}]")}
_BRACKET = re.compile(r"[()]")
_CLOSED = re.compile(r"\)")
_QUOTE = re.compile('"')
# Text that stands for itself, which is the last group: outside double quotes, and inside them.
_LITERAL = re.compile(rf"({_PLACEHOLDER.pattern})|\$?'([^']*)'|\\(.)|([^ \t\n;|&()<>'\"\\$`]+|\\\Z)", re.DOTALL)
_QUOTED_LITERAL = re.compile(r'\\(["\\$`])|([^"\\$`]+|\\)')
BLOCKS = ("if", "then", "elif", "else", "while", "until", "do", "{", "}", "(", ")")
PREFIXES = ("time", "!", "exec", "nohup", "sudo")  # the command follows these
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
MOST_TEXT = 4_000_000  # characters that the variables of a script may produce; they could double with each line
MOST_WORDS, LONGEST_COMMAND = 2_000, 100_000  # words and characters of a command
DEEPEST = 50  # the most levels of substitutions inside substitutions


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellCommand:
    """The words of one command, and the environment that the script gives it: exported variables, and assignments
    before the command's name."""

    words: tuple[str, ...]
    environment: dict[str, str]


class _TextLimit:
    """Counts the text that variables produce, in a script and in its substitutions."""

    def __init__(self) -> None:
        self.left = MOST_TEXT

    def take(self, values: Iterable[str]) -> None:
        """Raise ValueError if a script produces more text than any script that launches training."""
        self.left -= sum(len(value) + 1 for value in values)
        if self.left < 0:
            raise ValueError(f"its variables grow to more than {MOST_TEXT} characters")


def commands(script: str, file: Path | None = None) -> list[ShellCommand]:
    """Return every command of a script, in order. `file` is the script's file; YAML files of LLaMA-Factory and EasyR1
    are converted to the command that takes them. Raises ValueError if a quote or a bracket is not closed, or if
    substitutions are nested too deeply."""
    if file is not None and file.suffix in (".yaml", ".yml") and re.search(r"^stage *:", script, re.MULTILINE):
        return [ShellCommand(words=("llamafactory-cli", "train", str(file)), environment={})]
    if file is not None and file.suffix in (".yaml", ".yml") and re.search(r"^worker *:", script, re.MULTILINE):
        return [ShellCommand(words=("python", "-m", "verl.trainer.main", f"config={file}"), environment={})]
    if file is not None and file.suffix == ".py":
        words = words_of_script(script)
        if words is None:
            raise ValueError(
                "no config of TRL, such as GRPOConfig(...), is made in it; give the command that starts it"
            )
        return [ShellCommand(words=words, environment={})]
    own = {} if file is None else {name: [str(file)] for name in ("BASH_SOURCE", "0")}
    return _Script(script, own, Path.cwd(), _TextLimit()).commands()


def _require_short(command: ShellCommand) -> None:
    """Raise ValueError if a command is longer than any that launches training."""
    words, characters = len(command.words), sum(map(len, command.words))
    if words > MOST_WORDS:
        raise ValueError(f"a command has {words:,} words; one that starts training has at most {MOST_WORDS:,}")
    if characters > LONGEST_COMMAND:
        raise ValueError(
            f"a command has {characters:,} characters; one that starts training has at most {LONGEST_COMMAND:,}"
        )


class _Script:
    """Reads a script from left to right. Variables have the values that they have at that place."""

    def __init__(self, text: str, arrays: Mapping[str, list[str]], folder: Path, room: _TextLimit, depth: int = 0):
        self.text = re.sub(r"\\\r?\n", " ", text.replace("\r\n", "\n"))
        self.at = 0
        self.arrays = dict(arrays)  # every variable; a plain variable is a list of one value
        self.exported: set[str] = set()
        self.folder = folder
        self.room = room
        self.depth = depth

    @property
    def variables(self) -> dict[str, str]:
        return {name: values[0] for name, values in self.arrays.items() if values}

    def commands(self) -> list[ShellCommand]:
        found: list[ShellCommand] = []
        while self.at < len(self.text):
            if (command := self._finished(self._words())) is not None:
                if self.depth == 0:
                    _require_short(command)
                found.append(command)
        return found

    def _finished(self, words: list[str]) -> ShellCommand | None:
        """Make a command of its words. Assignments alone, `export` and `cd` only change the commands that follow."""
        words = list(dropwhile((*BLOCKS, *PREFIXES).__contains__, words))
        if words and words[0] in DECLARATIONS:
            names = [self._assigned(word) for word in words[1:] if not word.startswith("-")]
            self.exported.update(names if words[0] == "export" else ())
            return None
        leading = list(takewhile(lambda word: word == "env" or _ASSIGNMENT.fullmatch(word), words))
        words = words[len(leading) :]
        if not words:
            for word in leading:
                self._assigned(word)
            return None
        own = {match["name"]: match["value"] for match in map(_ASSIGNMENT.fullmatch, leading) if match}
        if words[0] == "cd" and len(words) == 2 and "$" not in words[1]:
            self.folder = Path(os.path.normpath(self.folder / words[1]))
        variables = self.variables
        exported = {name: variables[name] for name in sorted(self.exported) if name in variables}
        self.room.take(exported.values())
        return ShellCommand(words=tuple(words), environment={**exported, **own})

    def _assigned(self, word: str) -> str:
        """Return the variable that a word names; if the word is an assignment, set the variable first."""
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            return word
        before = self.variables.get(match["name"], "") if match["more"] else ""
        self.arrays[match["name"]] = [before + match["value"]]
        return match["name"]

    def _taken(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the text at the current position, and move behind it."""
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match

    def _words(self) -> list[str]:
        """Read the words up to the end of the command."""
        words: list[str] = []
        while self.at < len(self.text):
            if _PLACEHOLDER.match(self.text, self.at):
                words += self._word()
            elif heredoc := self._taken(_HEREDOC):
                end = re.compile(rf"^\s*{heredoc['word']}\s*$", re.MULTILINE).search(self.text, self.at)
                self.at = len(self.text) if end is None else end.end()
            elif redirection := self._taken(_REDIRECTED):
                if redirection["stream"] not in ("&1", "&2"):
                    self._word()
            elif self._taken(_END):
                return words
            elif array := self._taken(_ARRAY):
                before = self.arrays.get(array["name"], []) if array["more"] else []
                self.arrays[array["name"]] = before + self._bracketed()
            elif bracket := self._taken(_BRACKET):
                words.append(bracket[0])
            elif not self._taken(_GAP):
                words += self._word()
        return words

    def _bracketed(self) -> list[str]:
        """Read the words of an array, up to its closing bracket."""
        words: list[str] = []
        while not self._taken(_CLOSED):
            if self.at >= len(self.text):
                raise ValueError("a bracket is not closed")
            if not self._taken(_GAP_OF_ARRAY):
                words += self._word()
        return words

    def _word(self) -> list[str]:
        """Read one word. An array, or a variable without quotes, may turn it into several words or none."""
        fields, is_any = [""], False
        while self.at < len(self.text):
            if literal := self._taken(_LITERAL):
                fields[-1] += literal[literal.lastindex or 0]
                is_any = True
            elif self._taken(_QUOTE):
                self._quoted(fields)
                is_any = True
            elif self.text.startswith(("'", "$'"), self.at):
                raise ValueError("a ' is not closed")
            elif self.text[self.at] in "$`":
                values, is_known = self._expanded()
                split = [part for value in values for part in value.split()] if is_known else values
                _join(fields, split)
                is_any = is_any or bool(split)
            else:
                break
        return fields if is_any else []

    def _quoted(self, fields: list[str]) -> None:
        """Read the inside of double quotes into the word that is being read."""
        while not self._taken(_QUOTE):
            if literal := self._taken(_QUOTED_LITERAL):
                fields[-1] += literal[literal.lastindex or 0]
            elif self.at < len(self.text):
                _join(fields, self._expanded()[0])
            else:
                raise ValueError('a " is not closed')

    def _expanded(self) -> tuple[list[str], bool]:
        """Return the value of the `$...` or backticks at the current position and True, or the text as written and
        False."""
        start, values = self.at, None
        if match := self._taken(_VARIABLE):
            values = self.arrays.get(match[1])
            values = values[:1] if values else values
        elif self.text[start] == "`":
            self.at = self.text.find("`", start + 1) + 1
            if self.at == 0:
                raise ValueError("a ` is not closed")
            values = self._substituted(self.text[start + 1 : self.at - 1])
        elif self.text.startswith(("$(", "${"), start):
            self.at = self._closing(start + 1)
            inside = self.text[start + 2 : self.at - 1]
            if self.text.startswith("$((", start):
                values = _one(_computed(self._filled(inside[1:-1]), self.variables))
            else:
                values = self._parameter(inside) if self.text[start + 1] == "{" else self._substituted(inside)
        else:
            self.at = min(start + 2, len(self.text))
        if values is None:
            return [self.text[start : self.at]], False
        self.room.take(values)
        return values, not any("$" in value for value in values)

    def _closing(self, opening: int) -> int:
        """Return the position after the bracket that closes the one at `opening`; brackets in quotes do not count."""
        depth = 0
        for match in _NESTED[self.text[opening]].finditer(self.text, opening):
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(match[0], 0)
            if depth == 0:
                return match.end()
        raise ValueError(f"a {self.text[opening]} is not closed")

    def _parameter(self, inside: str) -> list[str] | None:
        """Return the value of `${inside}`; None if the script does not give it, or if the expression cuts or replaces
        text."""
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
        return " ".join(self._inner(f'"{text}"')._word())

    def _inner(self, text: str) -> "_Script":
        if self.depth == DEEPEST:
            raise ValueError("substitutions are nested too deeply")
        return _Script(text, self.arrays, self.folder, self.room, self.depth + 1)

    def _substituted(self, inside: str) -> list[str] | None:
        """Return what a command prints if it only computes or handles paths; None for any other command."""
        inner = self._inner(inside)
        words = [list(command.words) for command in inner.commands()]
        if not words or any("$" in word or "`" in word for line in words for word in line):
            return None
        if words[-1] == ["pwd"] and all(line[0] == "cd" for line in words[:-1]):
            return [str(inner.folder)]
        printed = PRINTED.get(words[0][0]) if len(words) == 1 else None
        return None if printed is None else _one(printed(words[0][1:]))


def _join(fields: list[str], values: list[str]) -> None:
    """Append the first value to the word that is being read; each further value begins a new word."""
    if values:
        fields[-1] += values[0]
        fields += values[1:]


def _one(text: str | None) -> list[str] | None:
    return None if text is None else [text]


def _computed(expression: str, variables: Mapping[str, str]) -> str | None:
    value = evaluated(expression, variables)
    return None if value is None else str(value)


PRINTED: dict[str, Callable[[list[str]], str | None]] = {
    "expr": lambda words: _computed(" ".join(words), {}),
    "echo": " ".join,
    "dirname": lambda words: str(PurePath(words[0]).parent) if words else None,
    "basename": lambda words: PurePath(words[0]).name.removesuffix(words[1] if words[1:] else "") if words else None,
    "realpath": lambda words: os.path.abspath(words[0]) if words else None,
}


def quoted(words: tuple[str, ...]) -> str:
    """Join words in one line, quoting those that contain white space."""
    return " ".join(shlex.quote(word) if re.search(r"\s", word) or not word else word for word in words)
