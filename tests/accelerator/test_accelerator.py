"""Runs on a pretended accelerator, in their own process because a backend is registered for a whole process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = Path(__file__).with_name("runs.py")


@pytest.mark.catalogue
def test_all_families_learn_and_decode_on_one_device_and_wait_only_where_it_is_allowed():
    """Three minutes of computing: whole steps of all families."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(RUNS)]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stdout + ran.stderr
