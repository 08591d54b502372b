"""The scripts of examples/python: one for each function that trains, short, and run in an empty directory with the
installed wheel."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.packaging.conftest import ROOT
from tiercel.config.keys import RECIPES

SCRIPTS = sorted((ROOT / "examples/python").glob("*.py"))
LONGEST_LINES = 15
LIMIT_SECONDS = 240  # each takes a few seconds on a machine where nothing else runs


def test_every_function_that_trains_has_a_script():
    assert {script.stem for script in SCRIPTS} == set(RECIPES)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_is_short_and_names_its_function(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_LINES
    assert f"tc.{script.stem}(" in text


@pytest.mark.notebook
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_trains_in_an_empty_directory(script, tmp_path):
    shutil.copyfile(script, tmp_path / script.name)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / script.stem
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert metrics[-1]["step"] == 2 and metrics[-1]["grad_norm"] > 0
    assert (run / "config.yaml").read_text(encoding="utf-8").startswith(f"# tiercel {script.stem}\n")
