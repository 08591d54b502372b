"""The commands and their flags, read from the parser."""

import argparse
from collections.abc import Iterator


def leaves(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command that does something, by its words."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield words, parser
    for group in groups:
        for name, inner in group.choices.items():
            yield from leaves(inner, (*words, name))


def positionals(parser: argparse.ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if not action.option_strings]


def required_options(parser: argparse.ArgumentParser) -> list[str]:
    """One of each group of flags of which one must be given."""
    groups = [group for group in parser._mutually_exclusive_groups if group.required]
    return [group._group_actions[0].option_strings[0] for group in groups]
