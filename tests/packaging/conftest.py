"""The archives that `make wheel` has built, and the wheel that it has installed next to this Python."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def only(pattern: str) -> Path:
    (found,) = (ROOT / "dist").glob(pattern)
    return found


@pytest.fixture(scope="session")
def wheel() -> Path:
    return only("*.whl")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return only("*.tar.gz")


@pytest.fixture(scope="session")
def command() -> str:
    """The installed command. It finds the installed package, and not the repository, from any directory."""
    return str(Path(sys.executable).parent / "tiercel")
