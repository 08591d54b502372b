"""Extras: every one of pyproject.toml has an entry, with the right verdict on packages that are present, missing, or
too old."""

import re
from pathlib import Path

import pytest

from tests.doctor.distributions import install
from tiercel.doctor.packages import extra_verdicts
from tiercel.doctor.verdict import texts

PURPOSES = texts("advice")["extras"]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A tiercel with two extras, whose distributions hide the real ones."""
    needs = (
        "torch>=2.11",
        'rapidfuzz>=3; extra == "rewards"',
        'made-up-scipy; extra == "rewards"',
        'av; extra == "dev"',
    )
    install(tmp_path, "tiercel", "0.1.0", *needs)
    metadata = tmp_path / "tiercel-0.1.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text() + "Provides-Extra: rewards\nProvides-Extra: dev\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_extra_for_users_has_a_purpose():
    (table,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", PYPROJECT.read_text(), re.MULTILINE | re.DOTALL
    )
    assert set(re.findall(r"^([a-z-]+) = \[", table, re.MULTILINE)) == {*PURPOSES, "dev"}


def test_an_extra_tells_its_versions(environment):
    install(environment, "rapidfuzz", "3.14.6")
    install(environment, "made-up-scipy", "1.2")
    (verdict,) = extra_verdicts()
    assert (verdict.name, verdict.status, verdict.remedy) == ("extra rewards", "ok", "")
    assert verdict.found == f"rapidfuzz 3.14.6, made-up-scipy 1.2; needed for {PURPOSES['rewards']}"


def test_a_missing_package_is_absent_with_the_line_that_installs_it(environment):
    install(environment, "rapidfuzz", "3.14.6")
    (verdict,) = extra_verdicts()
    assert (verdict.status, verdict.remedy) == ("absent", "pip install 'tiercel[rewards]'")
    assert verdict.found.startswith("rapidfuzz 3.14.6, made-up-scipy not installed; ")


def test_a_version_that_tiercel_does_not_admit_is_a_warning(environment):
    install(environment, "rapidfuzz", "2.9")
    (verdict,) = extra_verdicts()
    assert (verdict.status, verdict.remedy) == ("warning", "pip install 'tiercel[rewards]'")
    assert verdict.found.startswith("rapidfuzz 2.9; tiercel needs >=3, ")
