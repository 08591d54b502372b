"""Fake packages, imported by real children."""

import pytest

from tiercel.doctor.trials import import_verdict
from tiercel.doctor.verdict import texts

VLLM = texts("advice")["packages"]["vllm"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package `vllm` of that text, which hides a real one."""

    def write(text: str) -> None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm/__init__.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)

    return write


def verdict(seconds: float = 60.0):
    return import_verdict("vllm", VLLM, seconds=seconds)


def test_a_package_that_fails_is_broken_with_the_last_line_of_its_error(package):
    package("print('loading')\nraise ImportError('vllm/_C.abi3.so: undefined symbol: _ZN5torch7LibraryC1E')\n")
    found = verdict()
    assert (found.name, found.status) == ("import vllm", "broken")
    assert found.found == "ImportError: vllm/_C.abi3.so: undefined symbol: _ZN5torch7LibraryC1E"
    assert found.remedy


def test_a_part_that_is_loaded_late_is_asked_for(package):
    package("def __getattr__(name):\n    raise ImportError('no ' + name)\n")
    assert verdict().found == "ImportError: no LLM"


def test_a_package_that_imports_is_well(package):
    package("LLM = 1\n")
    assert (verdict().status, verdict().remedy) == ("ok", "")


def test_a_package_that_kills_its_process_is_broken(package):
    package("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert verdict().found == "its process was killed by SIGSEGV"


def test_a_package_that_hangs_is_ended_in_time(package):
    package("import time\ntime.sleep(600)\n")
    assert verdict(seconds=1.0).found == "no result within 1 s"


def test_a_package_that_is_not_there_is_absent(tmp_path, monkeypatch):
    (tmp_path / "nothing_of_that_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nothing_of_that_name", "nor_of_this"):
        found = import_verdict(name, VLLM)
        assert (found.status, found.remedy) == ("absent", "")
        assert "needed for rollout.engine: vllm" in found.found
