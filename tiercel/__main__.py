"""Run `python -m tiercel`."""

from tiercel.cli.main import entry_point

entry_point()
