"""A working directory with good recipes and the files that they name."""

from pathlib import Path

import pytest

from tests.config.recipes import write_files


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
