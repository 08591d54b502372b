"""Reading of weights into the system's file cache while Python imports the libraries that will load them."""

import os
import threading
from contextlib import suppress
from pathlib import Path

from tiercel.config import Recipe

CHUNK_BYTES = 16 * 2**20
MOST_SHARE = 0.5  # of the machine's memory; above it, the cache would drop the first files before they are used


def read_weights_ahead(recipe: Recipe) -> threading.Thread | None:
    """Start to read a local checkpoint's weights, once per machine. Returns the thread that reads, or None if the
    weights are not on this machine or are too large."""
    directory = Path(os.path.expanduser(recipe.model.path))
    if not os.path.isdir(directory) or os.environ.get("LOCAL_RANK", "0") != "0":
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
    with suppress(OSError):  # loading the weights will report it
        for file in files:
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(chunk):  # this call releases the interpreter's lock
                    pass
