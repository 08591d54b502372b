"""Starting the page beside a run, as a process of its own. Imports nothing of the page."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from tiercel.distributed.rank_status_files import NOTES
from tiercel.errors import EnvironmentProblem

PACKAGES = ("starlette", "uvicorn")
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", NOTES)  # variables that make a process a rank
_SECONDS_TO_END = 5.0


def require_packages() -> None:
    """Raises EnvironmentProblem if the extra `view` is not installed."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise EnvironmentProblem(f"the page needs {' and '.join(missing)}: pip install 'tiercel[view]'")


@contextmanager
def page_beside(run: Path) -> Iterator[None]:
    """Serve the page of a run inside; the run's directory need not be there yet. The process prints the address on
    stderr and ends with this one, however this one ends. Raises EnvironmentProblem without the extra `view`."""
    require_packages()
    words = [sys.executable, "-m", "tiercel", "view", str(run), "--beside", str(os.getpid())]
    own = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    # Ctrl-C is for the run, which saves and then ends the page.
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, env=own)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
