"""Files with the user's rewards, and checks of the processes that are left."""

import contextlib
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def reward_file(tmp_path: Path) -> Callable[[str], str]:
    """Write source to a file of its own and return `file.py:score`."""

    def write(source: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(textwrap.dedent(source))
        return f"{tmp_path / name}:score"

    return write


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """Fail if the test leaves a child process behind, dead and unreaped ones included."""
    before = children()
    yield
    assert children() <= before


def children() -> set[int]:
    """Ids of this process's children; Linux only."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    if not tasks.is_dir():
        pytest.skip("needs /proc")
    found: set[int] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found
