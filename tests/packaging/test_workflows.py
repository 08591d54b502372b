"""Files that say the same thing twice, and must agree."""

import json
import os
import subprocess

import yaml

from tests.packaging.conftest import ROOT
from tiercel import __version__


def test_the_workflow_runs_what_ci_runs(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    (script,) = (step["run"] for step in workflow["jobs"]["steps"]["steps"] if "run" in step)
    output = tmp_path / "output"
    given = {**os.environ, "GITHUB_OUTPUT": str(output)}
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=given, check=True)
    name, _, targets = output.read_text().partition("=")
    assert name == "targets"
    assert "for step in " + " ".join(["venv", *json.loads(targets)]) + "; do" in (ROOT / ".ci/run").read_text()
    assert {"lint", "types", "test"} <= set(json.loads(targets))


def test_the_citation_has_the_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_every_form_asks_for_the_doctor():
    forms = [file for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if file.name != "config.yml"]
    assert len(forms) == 2
    for form in forms:
        labels = [part["attributes"].get("label") for part in yaml.safe_load(form.read_text())["body"]]
        assert "tiercel doctor --json" in labels, form.name
