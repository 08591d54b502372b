"""Types of the values of flags. A value that makes no sense is refused with the reason, never replaced."""

import argparse
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
ASSUMED_UNIT = "GB"
LEAST_BYTES, MOST_BYTES = 10**9, 10**14  # of a GPU or a machine; a value outside this range has a wrong unit
LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySize:
    """An amount of memory."""

    byte_count: int
    text: str  # as given, with its unit
    is_assumed: bool  # whether it was given without a unit


def whole_number(text: str, least: int) -> int:
    """Read a whole number from `least` up."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"is {text}, but must be a whole number, {least} or more")
    return int(text)


def port(text: str) -> int:
    """Read a port that a server can listen on."""
    number = whole_number(text, least=1)
    if number > LAST_PORT:
        raise argparse.ArgumentTypeError(f"is {text}, but a port must be between 1 and {LAST_PORT}")
    return number


def size(text: str) -> MemorySize:
    """Read a size such as 80GB, 80 GiB or 81559MiB. A number without a unit means gigabytes."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in ("", *UNITS):
        known = ", ".join(unit.replace("I", "i") for unit in UNITS)
        raise argparse.ArgumentTypeError(f"is {text}, but must be a size such as 80GB (units: {known})")
    unit = match[2] or ASSUMED_UNIT
    byte_count = round(float(match[1]) * UNITS[unit.upper()])
    given = text.strip() if match[2] else f"{match[1]} {unit}"
    if not LEAST_BYTES <= byte_count <= MOST_BYTES:
        fault = "less than 1 GB" if byte_count < LEAST_BYTES else "more than 100 TB"
        raise argparse.ArgumentTypeError(f"{given} is {fault}; use a size such as 80GB")
    return MemorySize(byte_count=byte_count, text=given, is_assumed=not match[2])


def directory(text: str) -> Path:
    """Read the path of a directory that exists."""
    path = Path(text)
    if not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


def words(text: str) -> list[str]:
    """Split text into words as a shell would."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read as words: {error}") from error
