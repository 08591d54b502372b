"""Files that say the same thing twice must agree."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.packaging.conftest import ROOT
from tiercel import __version__


@pytest.mark.parametrize(("event", "arguments"), [("push", ["--base", "HEAD"]), ("schedule", ["--all"])])
def test_the_workflow_runs_what_ci_runs(tmp_path, event, arguments):
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    (script,) = (step["run"] for step in workflow["jobs"]["steps"]["steps"] if "run" in step)
    output = tmp_path / "output"
    given = {**os.environ, "GITHUB_OUTPUT": str(output), "EVENT": event, "BASE": "HEAD"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=given, check=True)
    name, _, targets = output.read_text().partition("=")
    assert name == "targets"
    planned = subprocess.run(
        [sys.executable, "-m", "tools.ci_plan", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert json.loads(targets) == planned.stdout.splitlines()


def test_the_citation_has_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_every_form_asks_for_the_doctor():
    forms = [file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        labels = [part["attributes"].get("label") for part in yaml.safe_load(form.read_text())["body"]]
        assert "tiercel doctor --json" in labels, form.name
