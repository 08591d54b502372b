"""Commands of a shell script, as far as launching scripts go: comments, continued lines, variables, quotes. Nothing is
run, and no other file is read."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}|(?P<bare>[A-Za-z_]\w*))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """Words of one command, and the variables that it sees from the script or from before its name."""

    words: tuple[str, ...]
    variables: dict[str, str]


def commands(script: str) -> list[Command]:
    """Every command of a script, in order. Raises ValueError where a quote is not closed."""
    found: list[Command] = []
    script_variables: dict[str, str] = {}
    for line in logical_lines(script):
        words = shlex.split(_filled(line, script_variables))
        assigned: dict[str, str] = {}
        if words and words[0] in ("export", "declare", "local"):
            words = words[1:]
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            assigned[match["name"]] = match["value"]
            words = words[1:]
        if words:
            found.append(Command(words=tuple(words), variables={**script_variables, **assigned}))
        else:
            script_variables |= assigned
    return found


def logical_lines(script: str) -> Iterator[str]:
    """Lines without comments, a backslash at the end joining two; `&&`, `;` and `|` end a command too."""
    text = re.sub(r"\\\r?\n", " ", script)
    line, quote, previous = "", "", "\n"
    for letter in text + "\n":
        if line.endswith("\0"):  # in a comment
            if letter == "\n":
                yield line[:-1]
                line = ""
        elif quote:
            line += letter
            quote = "" if letter == quote and previous != "\\" else quote
        elif letter in "\"'":
            line, quote = line + letter, letter
        elif letter == "#" and previous in " \t\n;":
            line += "\0"
        elif letter in "\n;|" or (letter == "&" and previous == "&"):
            yield line.rstrip("&")
            line = ""
        else:
            line += letter
        previous = letter
    if line.strip():
        yield line


def _filled(line: str, variables: dict[str, str]) -> str:
    """Variables that the script sets, outside single quotes; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        known = variables.get(name, match["default"])
        return match[0] if known is None else known

    parts = re.split(r"('[^']*')", line)
    return "".join(part if part.startswith("'") else _VARIABLE.sub(value, part) for part in parts)
