"""A run with turns that is killed twice; `make faults` kills it twenty times."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.catalogue


def test_a_run_that_is_killed_between_turns_ends_in_the_same_bytes():
    """In a process of its own, since it forks."""
    command = [sys.executable, "-m", "benchmarks.faults", "--short", "--only", "SIGKILL between turns"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 2/2 |" in done.stdout
