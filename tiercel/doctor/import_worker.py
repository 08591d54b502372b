"""The child that imports one package."""

import os
from importlib import import_module


def main(arguments: list[str]) -> None:
    """Import the package. The argument is "module" or "module:attribute"."""
    module, _, attribute = arguments[0].partition(":")
    imported = import_module(module)
    if attribute:
        getattr(imported, attribute)
    os._exit(0)  # faults of a package at the interpreter's exit do not count
