"""Two commands and one run directory, whose lock was removed: the first continues, or ends and leaves it to the
other."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.test_loops import sft_recipe, write_rows
from tiercel.config import recipe_to_yaml
from tiercel.errors import EXIT_TAKEN, EXIT_USER
from tiercel.runs.lock import WRITER

STEPS = 400


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path) -> Path:
    changes = {"data": {"eval": None, "workers": 0}, "train": {"steps": STEPS, "save_every": STEPS}}
    file = tmp_path / "sft.yaml"
    file.write_text(
        recipe_to_yaml(sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", **changes))
    )
    return file


def start(recipe: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "tiercel", "sft", str(recipe)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def has_begun(process: subprocess.Popen[str], run: Path, line: str = '"step": 2') -> None:
    """Wait until a command trains."""
    deadline = time.monotonic() + 120
    while line not in ((run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr and process.stderr.read()
        time.sleep(0.05)


def test_two_commands_and_a_lock_that_was_removed(recipe, tmp_path):
    run = tmp_path / "run"
    first = start(recipe)
    second = None
    try:
        has_begun(first, run)
        first.send_signal(signal.SIGSTOP)  # it cannot create the lock again meanwhile
        (run / ".lock").unlink()
        refused = start(recipe)
        _, said = refused.communicate(timeout=120)
        assert refused.returncode == EXIT_USER and f"process {first.pid} on" in said and "is writing" in said

        shutil.rmtree(run / "pulse")
        (run / "metrics.jsonl").unlink()
        second = start(recipe)
        has_begun(second, run)
        first.send_signal(signal.SIGCONT)
        _, said = first.communicate(timeout=120)
        assert first.returncode == EXIT_TAKEN, said
        assert f"process {second.pid} on" in said and "has taken" in said and "Traceback" not in said
        assert not (run / "end.json").exists() and (run / "pulse" / WRITER).exists()
        assert second.poll() is None
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.communicate()
