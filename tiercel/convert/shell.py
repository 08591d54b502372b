"""Reading the commands of a shell script that starts training. Nothing is executed, and no other file is read.

Variables that the script itself sets are filled in, arithmetic and the few substitutions that only handle paths are
computed, and shlex splits the words. What only a shell could know, such as `$(nproc)`, stays as written, with its
dollar sign, and is named to the user.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path, PurePath

from tiercel.convert.arithmetic import evaluated
from tiercel.convert.python_scripts import code_of_notebook, words_of_script

# What follows is the command.
PREFIXES = ("if", "then", "elif", "else", "while", "until", "do", "{", "}", "time", "!", "exec", "nohup", "sudo")
CALLERS_WORDS = ("$@", "$*", "${@}", "${*}")  # of whoever starts the script, which is read as if started without any
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
MOST_TEXT = 2_000_000  # characters that the variables of a script give; they could double with each line
MOST_WORDS, LONGEST_COMMAND = 2_000, 100_000  # words and characters of a command
DEEPEST = 5  # brackets in brackets


def _nested(opening: str, closing: str, inside: str) -> str:
    """Return a pattern of what stands between two brackets, which may hold such brackets."""
    pattern = ""
    for _ in range(DEEPEST):
        pattern = rf"(?:{inside}|{opening}{pattern}{closing})*"
    return pattern


_QUOTES = r"'[^']*'|\"(?:\\.|[^\"\\])*\""
# In each group of alternatives one alone fits a character, so a text that does not match is left at once.
_LIST = _nested(r"\(", r"\)", rf"(?<!\S)#[^\n]*(?![^\n])|(?<=\S)#|{_QUOTES}|\\.|[^()'\"\\#]")
_BRACKETED = rf"\$\({_LIST}\)|\$\{{{_nested('{', '}', '[^{}]')}\}}|`[^`]*`"
_EXPANSION = rf"{_BRACKETED}|\$(?:[A-Za-z_]\w*|0)"
_DOUBLE = rf"\"(?:\\.|{_BRACKETED}|\$(?![({{])|[^\"\\$`])*\""
_PLACEHOLDER = r"<[A-Za-z][\w.-]*>"  # of documentation, such as <your_image_root>
_WORD = rf"(?:'[^']*'|{_DOUBLE}|{_EXPANSION}|\\.|[^\s;|&<>()'\"\\$`])+"
_REDIRECTED = rf"(?:\d?>>?|&>>?|<<?<?)(?:&\d|[ \t]*{_WORD})"
_PARTS = "|".join((
    r"(?P<comment>(?<![^\s;|&()])#[^\n]*)", rf"(?P<literal>{_PLACEHOLDER})", rf"(?P<redirected>{_REDIRECTED})",
    r"(?P<single>\$?'[^']*')", rf"(?P<double>{_DOUBLE})", r"\\.", rf"(?P<expansion>{_EXPANSION})",
    r"\$(?![A-Za-z_0({'])", rf"(?<==)\({_LIST}\)", r"[^\n;|&()'\"\\$`]",
))  # fmt: skip
_PART = re.compile(_PARTS, re.DOTALL)
_COMMAND = re.compile(rf"(?P<command>(?:{_PARTS})+)|(?P<end>[\n;|&()])|(?P<open>.)", re.DOTALL)
_QUOTED_PART = re.compile(rf"\\(?P<escaped>[$`])|\\.|(?P<expansion>{_EXPANSION})", re.DOTALL)
_HEREDOC = re.compile(
    r"(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*)(?P=quote).*?(?:^[ \t]*(?P=word)[ \t]*$|\Z)", re.M | re.S
)
_DECLARED = r"\s*(?:(?:export|declare|local|readonly|typeset)\s+(?:-\w+\s+)*)?"
_ARRAY = re.compile(_DECLARED + r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=\((?P<values>.*)\)\s*", re.DOTALL)
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_PARAMETER = re.compile(
    r"(?P<count>#?)(?P<name>\w+)(?:\[(?P<index>\d+|@|\*)\])?(?:(?P<rule>:?[-=+])(?P<other>.*))?", re.DOTALL
)


# Of a file that gives a scheduler a command, such as SkyPilot's.
_COMMAND_IN_SETTINGS = re.compile(r"^[ \t-]*(run|commands?|cmd|args|script|entrypoint|setup)[ \t]*:", re.MULTILINE)
_ALLEXPORT = re.compile(r"\s([-+])\w*(?:a\w*|o\sallexport)(?!\S)")  # in words of `set`
_END_OF_COMMENT = re.compile(
    r"^([ \t]*#[^\n]*?)\\+[ \t]*$", re.MULTILINE
)  # a comment does not continue on the next line


@dataclass(frozen=True, kw_only=True, slots=True)
class ShellCommand:
    """The words of one command, and the environment that the script gives it: exported variables, and assignments
    before the command's name."""

    words: tuple[str, ...]
    environment: dict[str, str]
    unexported: tuple[str, ...] = ()  # variables of the script that reach no command, neither by export nor by name


def commands(script: str, file: Path | None = None) -> list[ShellCommand]:
    """Return every command of a script, in order. `file` is the script's file; YAML files of LLaMA-Factory and EasyR1
    stand for the command that takes them. Raises ValueError where a quote or a bracket is not closed, or the script
    makes more text than any that starts training."""
    suffix = "" if file is None else file.suffix
    if suffix in (".yaml", ".yml") and re.search(r"^stage *:", script, re.MULTILINE):
        return [ShellCommand(words=("llamafactory-cli", "train", str(file)), environment={})]
    if suffix in (".yaml", ".yml") and re.search(r"^worker *:", script, re.MULTILINE):
        return [ShellCommand(words=("python", "-m", "verl.trainer.main", f"config={file}"), environment={})]
    if suffix in (".yaml", ".yml") and not _COMMAND_IN_SETTINGS.search(script):
        raise ValueError(
            "does not say which program reads these settings; give the command that does, such as 'trl grpo --config "
            "FILE', or 'llamafactory-cli train FILE', whose settings have a stage"
        )
    if suffix == ".ipynb":
        script, suffix = code_of_notebook(script), ".py"
    if suffix == ".py":
        if (words := words_of_script(script)) is None:
            raise ValueError(
                "does not create a config of TRL, such as GRPOConfig(...); give the command that starts it"
            )
        return [ShellCommand(words=words, environment={})]
    own = {} if file is None else {name: [str(file)] for name in ("BASH_SOURCE", "0")}
    return list(_Script(own).commands(script))


class _Script:
    """The variables of a script, with the values that they have at the place that is being read."""

    def __init__(self, variables: Mapping[str, list[str]]):
        self.variables = dict(variables)  # a plain one is a list of one value
        self.exported: set[str] = set()
        self.exports_all = False  # as after `set -a`
        self.expanded: set[str] = set()
        self.text_left = MOST_TEXT

    def commands(self, script: str) -> Iterator[ShellCommand]:
        """Yield each command of the script. Assignments alone, and `export`, only change those that follow."""
        script = _END_OF_COMMENT.sub(r"\1", script.replace("\r\n", "\n"))
        text = _HEREDOC.sub("", re.sub(r"\\(?:\n|\s*\Z)", " ", script))
        for match in _COMMAND.finditer(text):
            if match["open"]:
                raise ValueError(f"a {match['open']} is not closed, or brackets are nested too deeply")
            if (array := _ARRAY.fullmatch(match["command"] or "")) is not None:
                before = self.variables.get(array["name"], []) if array["more"] else []
                self.variables[array["name"]] = before + self._words(array["values"])
            elif match["command"] and (command := self._finished(self._words(match["command"]))) is not None:
                yield command

    def _finished(self, words: list[str]) -> ShellCommand | None:
        """Make a command of its words; None where they only set variables."""
        words = list(dropwhile(PREFIXES.__contains__, words))
        if words and words[0] in DECLARATIONS:
            names = [self._assigned(word) for word in words[1:] if not word.startswith("-")]
            self.exported.update(names if words[0] == "export" else ())
            return None
        if words[:1] == ["set"]:
            options = " ".join(takewhile("--".__ne__, words))
            for match in _ALLEXPORT.finditer(options):
                self.exports_all = match[1] == "-"
        leading = list(takewhile(lambda word: word == "env" or _ASSIGNMENT.fullmatch(word), words))
        if len(leading) == len(words):
            for word in leading:
                self._assigned(word)
            return None
        own = {match["name"]: match["value"] for match in map(_ASSIGNMENT.fullmatch, leading) if match}
        exported = {name: self.variables[name][0] for name in sorted(self.exported) if self.variables.get(name)}
        self._take(exported.values())
        reached = {*exported, *own, *self.expanded}
        unexported = tuple(name for name in self.variables if name not in reached)
        return ShellCommand(words=tuple(words[len(leading) :]), environment={**exported, **own}, unexported=unexported)

    def _assigned(self, word: str) -> str:
        """Return the variable that a word names, after giving it its value where the word has one."""
        if (match := _ASSIGNMENT.fullmatch(word)) is None:
            return word
        before = self.variables.get(match["name"], [])[:1] if match["more"] else []
        self.variables[match["name"]] = ["".join([*before, match["value"]])]
        self.exported.update([match["name"]] if self.exports_all else [])
        return match["name"]

    def _take(self, texts: Iterable[str]) -> None:
        """Raise ValueError where a script gives more text than any that starts training."""
        self.text_left -= sum(len(text) + 1 for text in texts)
        if self.text_left < 0:
            raise ValueError(f"its variables expand to more than {MOST_TEXT} characters")

    def _words(self, text: str) -> list[str]:
        """Split a command. Raises ValueError where it is longer than any that starts training."""
        filled = _PART.sub(self._filled, text)
        if (characters := len(filled)) > LONGEST_COMMAND:
            raise ValueError(
                f"a command has {characters:,} characters, but one that starts training may have at most "
                f"{LONGEST_COMMAND:,}"
            )
        words = [word for word in shlex.split(filled) if word not in CALLERS_WORDS]
        if len(words) > MOST_WORDS:
            raise ValueError(
                f"a command has {len(words):,} words, but one that starts training may have at most {MOST_WORDS:,}"
            )
        return words

    def _filled(self, match: re.Match[str]) -> str:
        """Return a part of a command as shlex shall read it: with values in place of what the script gives."""
        part = match[0]
        if match["comment"] or match["redirected"]:
            return " "
        if match["literal"]:
            return shlex.quote(part)
        if match["single"]:
            return part.removeprefix("$")
        if match["double"]:
            array = re.fullmatch(r'"\$\{(\w+)\[@\]\}"', part)  # which stands for all of its values
            values = self.variables.get(array[1]) if array else None
            return _QUOTED_PART.sub(self._filled_in_quotes, part) if values is None else shlex.join(values)
        if match["expansion"]:
            values = self._values(part)
            if values is None or any("$" in value for value in values):  # no shell could split it yet
                return shlex.join(values or [part])
            return shlex.join(word for value in values for word in value.split())
        return part

    def _filled_in_quotes(self, match: re.Match[str]) -> str:
        if match["expansion"] is None:
            return match["escaped"] or match[0]
        values = self._values(match[0])
        text = match[0] if values is None else " ".join(values)
        return text.replace("\\", "\\\\").replace('"', '\\"')

    def _values(self, expansion: str) -> list[str] | None:
        """Return what an expansion stands for; None where the script does not say."""
        if expansion.startswith("$(("):
            self.expanded.update(re.findall(r"[A-Za-z_]\w*", expansion))
            values = _computed(self._text(expansion[3:-2]), self.variables)
        elif expansion.startswith(("$(", "`")):
            values = self._printed(expansion[2 if expansion[0] == "$" else 1 : -1])
        else:
            values = self._parameter(expansion[2:-1] if expansion[1] == "{" else expansion[1:])
        self._take(values or [])
        return values

    def _parameter(self, inside: str) -> list[str] | None:
        """Return the value of `${inside}`; None where the script does not give it, or it cuts or replaces text."""
        if (match := _PARAMETER.fullmatch(inside)) is None:
            return None
        self.expanded.add(match["name"])
        values = self.variables.get(match["name"])
        if match["count"]:
            return None if values is None else [str(len(values))]
        if rule := match["rule"]:
            is_there = bool(values and (values[0] or not rule.startswith(":")))
            if is_there and not rule.endswith("+"):
                return values and values[:1]
            found = [self._text(match["other"]) if is_there != rule.endswith(("-", "=")) else ""]
            if rule.endswith("="):
                self.variables[match["name"]] = found
            return found
        if not values or match["index"] in ("@", "*"):
            return values if values is None or match["index"] else [""]
        place = int(match["index"] or 0)
        return values[place : place + 1] or None

    def _text(self, text: str) -> str:
        """Return a text with its variables filled in, as one word."""

        def filled(match: re.Match[str]) -> str:
            return " ".join(self._values(match[0]) or [match[0]]) if match["expansion"] else match[0]

        return _QUOTED_PART.sub(filled, text).strip("'\"")

    def _printed(self, inside: str) -> list[str] | None:
        """Return what a command prints that only computes or handles paths; None for any other."""
        inner = _Script(self.variables)
        inner.text_left = self.text_left
        lines = [list(command.words) for command in inner.commands(inside)]
        self.expanded |= inner.expanded
        if not lines or any("$" in word or "`" in word for line in lines for word in line):
            return None
        if lines[-1] == ["pwd"] and all(line[0] == "cd" and len(line) == 2 for line in lines[:-1]):
            return [os.path.normpath(Path.cwd().joinpath(*(line[1] for line in lines[:-1])))]
        printed = PRINTED.get(lines[0][0]) if len(lines) == 1 else None
        return None if printed is None else printed(lines[0][1:])


def _computed(expression: str, variables: Mapping[str, list[str]]) -> list[str] | None:
    value = evaluated(expression, {name: values[0] for name, values in variables.items() if values})
    return None if value is None else [str(value)]


PRINTED: dict[str, Callable[[list[str]], list[str] | None]] = {
    "expr": lambda words: _computed(" ".join(words), {}),
    "echo": lambda words: [" ".join(words)],
    "dirname": lambda words: [str(PurePath(path).parent) for path in words[:1]] or None,
    "basename": lambda words: [PurePath(path).name.removesuffix("".join(words[1:2])) for path in words[:1]] or None,
    "realpath": lambda words: [os.path.abspath(path) for path in words[:1]] or None,
}


def quoted(words: tuple[str, ...]) -> str:
    """Join words in one line, quoted where they hold white space."""
    return " ".join(shlex.quote(word) if re.search(r"\s", word) or not word else word for word in words)
