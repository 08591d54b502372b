"""Installed versions against the requirements of packages, on made-up metadata."""

import pytest

from tests.doctor.distributions import install
from tiercel.doctor.packages import judge_python, package_verdicts


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A directory whose distributions hide the real ones."""
    install(tmp_path, "tiercel", "0.1.0", "torch>=2.6", "transformers>=5.17,<6", 'vllm>=0.19; extra == "vllm"')
    install(tmp_path, "torchvision", "0.1.0")  # without any requirement for torch
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def verdicts():
    return {verdict.name: verdict for verdict in package_verdicts()}


def test_what_is_installed_here_is_admitted():
    found = verdicts()
    names = ("python", "torch", "transformers", "tokenizers", "huggingface-hub", "peft", "safetensors", "pillow")
    assert {found[name].status for name in names} == {"ok"}


def test_a_version_out_of_tiercels_range_is_broken(environment):
    install(environment, "transformers", "4.57.1")
    verdict = verdicts()["transformers"]
    assert verdict.status == "broken"
    assert verdict.found == "4.57.1; tiercel needs <6,>=5.17"
    assert verdict.remedy.startswith("pip install 'transformers<6,>=5.17'")


def test_a_range_of_an_extra_holds_for_what_is_there(environment):
    install(environment, "vllm", "0.8.5")
    assert "tiercel needs >=0.19" in verdicts()["vllm"].found


def test_vllms_own_torch_is_asked_for(environment):
    install(environment, "torch", "2.13.0")
    install(environment, "vllm", "0.19.1", "torch==2.9.1")
    verdict = verdicts()["torch"]
    assert verdict.status == "broken"
    assert verdict.found == "2.13.0; vllm needs ==2.9.1"
    assert all(words in verdict.remedy for words in ("pip install 'torch==2.9.1,", ">=2.6'", "upgrade vllm"))


def test_a_pin_is_met_by_a_local_build_of_its_version(environment):
    install(environment, "torch", "2.9.1+cu128")
    install(environment, "vllm", "0.19.1", "torch==2.9.1")
    assert verdicts()["torch"].status == "ok"


def test_a_range_between_other_packages_is_a_warning(environment):
    install(environment, "transformers", "5.20.0", "tokenizers<0.24,>=0.23")
    install(environment, "tokenizers", "0.22.0")
    verdict = verdicts()["tokenizers"]
    assert (verdict.status, verdict.found) == ("warning", "0.22.0; transformers needs <0.24,>=0.23")


def test_metadata_without_a_version_is_a_damaged_installation(environment):
    install(environment, "peft", None)
    verdict = verdicts()["peft"]
    assert verdict.status == "broken" and "partly removed" in verdict.found
    assert verdict.remedy == "pip install --force-reinstall peft"


def test_a_version_that_cannot_be_compared_is_passed_on(environment):
    install(environment, "torch", "built-by-hand")
    verdict = verdicts()["torch"]
    assert (verdict.status, verdict.found) == ("ok", "built-by-hand")


def test_a_python_out_of_range_is_broken():
    assert judge_python("3.11.4").status == "ok"
    assert judge_python("3.9.1").status == "broken"
