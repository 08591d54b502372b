"""The installed wheel, in an empty directory outside the repository."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

WAIT_SECONDS = 240


def output_of(*command: str, at: Path) -> str:
    done = subprocess.run(command, cwd=at, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_is_that_of_the_wheel(command, tmp_path):
    where = output_of(sys.executable, "-c", "import tiercel; print(tiercel.__file__)", at=tmp_path).strip()
    assert Path(where).is_relative_to(Path(command).parents[1])
    assert "tiercel demo" in output_of(command, "--help", at=tmp_path) + output_of(
        command, "demo", "--help", at=tmp_path
    )


def test_a_recipe_of_the_users_own_is_used_and_named(command, tmp_path):
    place = "from tiercel.demo.running import require_recipes; require_recipes('demo-sft.yaml', 'demo-grpo.yaml')"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/demo-grpo.yaml").write_text("mine")
    said = output_of(sys.executable, "-c", place, at=tmp_path)
    assert said.splitlines() == ["recipes/demo-grpo.yaml is not the one that this tiercel ships; it is used as it is"]
    assert (tmp_path / "recipes/demo-grpo.yaml").read_text() == "mine"
    assert (tmp_path / "recipes/demo-sft.yaml").stat().st_size > 100


def test_the_demo_trains_in_an_empty_directory(command, tmp_path):
    """Its first steps are enough here; the release runs it whole."""
    log = (tmp_path / "log").open("wb")
    demo = subprocess.Popen([command, "demo"], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not any("loss" in row for row in metrics(tmp_path)):
            assert demo.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(1)
    finally:
        os.killpg(demo.pid, signal.SIGKILL)
        demo.wait()
        log.close()
    assert (tmp_path / "recipes/demo-grpo.yaml").is_file()


def metrics(directory: Path) -> list[dict]:
    """Complete lines of metrics.jsonl of the demo's runs."""
    texts = [file.read_text() for file in directory.glob("runs/demo*/metrics.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
