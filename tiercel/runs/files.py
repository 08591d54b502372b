"""Writing files so that a crash leaves the old one or the new one, never a part."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiercel.reliability.redaction import redact, redact_values


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename over."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes durable, or the renames in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def json_line(values: Mapping[str, Any]) -> str:
    """One line of JSON without secrets; NaN and infinities are refused, for no reader agrees on them."""
    line = json.dumps(values, ensure_ascii=False, allow_nan=False)
    if redact(line) != line:
        line = json.dumps(redact_values(values), ensure_ascii=False, allow_nan=False)
    return line + "\n"
