"""The parser of the command line, made from the table of commands and options in commands.txt."""

import argparse
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from tiercel import __version__
from tiercel.cli.values import directory, port, size, whole_number, words
from tiercel.config.schema import Quantization
from tiercel.planning.devices import DEVICES
from tiercel.tables import table_rows

SHELLS = ("bash", "zsh", "tcsh")
PAGE = "--view"
KINDS: dict[str, dict[str, Any]] = {  # of values, as the table names them
    "switch": {"action": "store_true"},
    "text": {},
    "file": {"type": Path},
    "files": {"type": Path, "action": "append", "default": []},
    "runs": {"type": Path, "nargs": "+"},
    "folders": {"type": Path, "nargs": "*", "default": [Path("runs")]},
    "directory": {"type": directory},
    "overrides": {"nargs": "*", "default": []},
    "0 or more": {"type": partial(whole_number, least=0)},
    "1 or more": {"type": partial(whole_number, least=1)},
    "port": {"type": port},
    "size": {"type": size},
    "words": {"type": words, "default": []},
    "device": {"choices": DEVICES},
    "quantization": {"choices": get_args(Quantization)},
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tiercel",
        description="LoRA fine-tuning and GRPO of vision-language models.",
        epilog="example: tiercel grpo recipes/demo-grpo.yaml train.steps=20 output=runs/try",
    )
    parser.add_argument("--version", action="version", version=f"tiercel {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help='print what makes the shell complete commands: eval "$(tiercel --print-completion bash)"',
    )
    parser.set_defaults(without_command=parser)
    above = {"": parser.add_subparsers(dest="command", metavar="COMMAND")}
    for name, ((text, example), *options) in _blocks().items():
        if not text:
            continue
        group, _, leaf = name.rpartition(" ")
        command = above[group].add_parser(leaf, help=text, description=text, epilog=example and f"example: {example}")
        _add_options(command, options)
        if not example:
            command.set_defaults(without_command=command)
            above[name] = command.add_subparsers(dest="look", metavar="COMMAND")
    return parser


def rank_options() -> argparse.ArgumentParser:
    """Return the parser of the options that only the launcher reads. The ranks get all other options."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser, _blocks()["ranks"][1:])
    return parser


@cache
def _blocks() -> dict[str, list[list[str]]]:
    """Read the table: what it says of each command and set of options, and then their options."""
    blocks: dict[str, list[list[str]]] = {}
    for first, *columns in table_rows("tiercel.cli", "commands.txt"):
        mark, _, name = first.partition(" ")
        if mark == ">":
            options = blocks[name] = [columns]
        else:
            options += blocks[name][1:] if mark == "+" else [[first, *columns]]
    return blocks


def _add_options(command: argparse.ArgumentParser, options: Iterable[list[str]]) -> None:
    groups: dict[str, argparse._ActionsContainer] = {"": command}
    for name, kind, default, metavar, text, group in options:
        if group not in groups:
            groups[group] = command.add_mutually_exclusive_group(required=group.endswith("!"))
        given = {**KINDS[kind], "help": argparse.SUPPRESS if text == "-" else text}
        given |= {key: value for key, value in (("default", default), ("metavar", metavar)) if value}
        groups[group].add_argument(name, **given)


class PrintCompletion(argparse.Action):
    """Prints a shell's completion script for all commands and options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: Any, option: str | None = None):
        import shtab  # needed only here

        for each in _every_action(parser):
            if each.type in (Path, directory) or each.dest in ("target", "model", "given"):
                each.complete = shtab.FILE  # type: ignore[attr-defined]
        print(shtab.complete(parser, shell))
        parser.exit()


def _every_action(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _every_action(command)
