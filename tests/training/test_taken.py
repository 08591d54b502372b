"""Two commands and one run directory, whose lock was removed: the first continues, or ends and leaves it to the
other."""

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.forked import Command, commands
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


def start(recipe: Path, log: Path) -> Command:
    with log.open("wb") as file:
        return commands().start(["sft", str(recipe)], file)


def has_begun(process: Command, run: Path, log: Path, line: str = '"step": 2') -> None:
    """Wait until a command trains."""
    deadline = time.monotonic() + 120
    while line not in ((run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_two_commands_and_a_lock_that_was_removed(recipe, tmp_path):
    run = tmp_path / "run"
    logs = [tmp_path / f"{name}.log" for name in ("first", "refused", "second")]
    first = start(recipe, logs[0])
    second = None
    try:
        has_begun(first, run, logs[0])
        first.send_signal(signal.SIGSTOP)  # it cannot create the lock again meanwhile
        (run / ".lock").unlink()
        refused = start(recipe, logs[1])
        code, said = refused.wait(120), logs[1].read_text()
        assert code == EXIT_USER and f"process {first.pid} on" in said and "is writing" in said

        shutil.rmtree(run / "pulse")
        (run / "metrics.jsonl").unlink()
        second = start(recipe, logs[2])
        has_begun(second, run, logs[2])
        first.send_signal(signal.SIGCONT)
        code, said = first.wait(120), logs[0].read_text()
        assert code == EXIT_TAKEN, said
        assert f"process {second.pid} on" in said and "has taken" in said and "Traceback" not in said
        assert not (run / "end.json").exists() and (run / "pulse" / WRITER).exists()
        assert second.poll() is None
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait(30)
