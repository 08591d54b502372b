"""Weights are brought into the system's file cache while Python imports what will load them, and the disk is idle."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from tiercel.runs.recipe import Recipe

CHUNK_BYTES = 16 * 2**20
MOST_SHARE = 0.5  # of the machine's memory, or what was read first would be gone before it is used


def read_weights_ahead(recipe: Recipe) -> threading.Thread | None:
    """Begin to read a local checkpoint's weights, once on a machine. None where there are none here, or too many."""
    directory = Path(recipe.model.path).expanduser()
    if not directory.is_dir() or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    files = [file for file in sorted(directory.glob("*.safetensors")) if file.is_file()]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not files or sum(file.stat().st_size for file in files) > MOST_SHARE * memory:
        return None
    thread = threading.Thread(target=_read, args=(files,), daemon=True)
    thread.start()
    return thread


def _read(files: list[Path]) -> None:
    chunk = bytearray(CHUNK_BYTES)
    with suppress(OSError):  # the one who loads them says it
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(chunk):  # without the interpreter's lock
                    pass
