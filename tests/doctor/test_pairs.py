"""Every entry of the table, with versions that match it and with their corrected ones."""

import pytest
from packaging.version import Version

from tests.doctor.distributions import install
from tiercel.doctor.packages import blame_packages, is_bad, judge_pairs, version_of
from tiercel.doctor.verdict import texts
from tiercel.errors import EnvironmentProblem

CASES = [  # bad, corrected
    ({"torch": "2.6.0", "torchvision": "0.20.1"}, {"torch": "2.6.0", "torchvision": "0.21.0"}),
    ({"torch": "2.13.0", "torchvision": "0.27.0"}, {"torch": "2.13.0", "torchvision": "0.28.0"}),
    ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}),
    ({"nvidia-cublas-cu12": "12.1.3.1"}, {"nvidia-cublas-cu12": "12.4.5.8"}),
    ({"torch": "2.9.1", "nvidia-cudnn-cu12": "9.10.2.21"}, {"torch": "2.9.1", "nvidia-cudnn-cu12": "9.15.1.9"}),
    ({"torch": "2.9.0", "nvidia-cudnn-cu13": "9.21.0.82"}, {"torch": "2.10.0", "nvidia-cudnn-cu13": "9.15.1.9"}),
    ({"nvidia-nccl-cu12": "2.29.2"}, {"nvidia-nccl-cu12": "2.29.3"}),
    ({"nvidia-nccl-cu13": "2.29.2"}, {"nvidia-nccl-cu13": "2.28.9"}),
    ({"torch": "2.2.2", "numpy": "2.0.0"}, {"torch": "2.3.0", "numpy": "2.0.0"}),
    ({"peft": "0.17.1", "transformers": "5.17.0"}, {"peft": "0.18.0", "transformers": "5.17.0"}),
    ({"peft": "0.19.1", "torchao": "0.15.0"}, {"peft": "0.19.1", "torchao": "0.16.0"}),
    ({"peft": "0.18.1", "torchao": "0.18.0"}, {"peft": "0.21.2", "torchao": "0.18.0"}),
    ({"deepspeed": "0.18.2"}, {"deepspeed": "0.18.3"}),
    ({"deepspeed": "0.14.0", "torch": "2.4.0"}, {"deepspeed": "0.14.3", "torch": "2.4.0"}),
    ({"flash-attn": "2.8.2", "torch": "2.6.0+cu124"}, {"flash-attn": "2.7.4.post1", "torch": "2.6.0+cu124"}),
    ({"flash-attn": "2.7.4.post1", "torch": "2.7.0"}, {"flash-attn": "2.8.3", "torch": "2.7.0"}),
]


def judged(versions):
    return judge_pairs(lambda name: Version(versions[name]) if name in versions else None)


@pytest.mark.parametrize(("bad", "mended"), CASES)
def test_a_bad_pair_is_named_with_its_remedy_and_its_mended_one_is_not(bad, mended):
    (verdict,) = judged(bad)
    assert verdict.status in ("warning", "broken") and verdict.remedy
    assert all(f"{name} {version}" in verdict.found for name, version in bad.items())
    (verdict,) = judged(mended)
    assert verdict.status == "ok"


def test_every_entry_is_met_by_a_case():
    met = {
        number
        for bad, _ in CASES
        for number, pair in enumerate(texts("pairs"))
        if set(pair["packages"]) <= set(bad) and is_bad(pair, [Version(bad[name]) for name in pair["packages"]])
    }
    assert met == set(range(len(texts("pairs"))))


def test_an_import_that_fails_is_blamed_on_packages_that_do_not_fit(tmp_path, monkeypatch):
    install(tmp_path, "torchvision", "0.10.0")
    monkeypatch.syspath_prepend(tmp_path)

    def imported(reason: str) -> None:
        try:
            raise RuntimeError(reason)
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AttentionInterface'") from error

    with pytest.raises(ModuleNotFoundError) as caught:
        imported("operator torchvision::nms does not exist")
    with pytest.raises(EnvironmentProblem, match=r"torchvision 0\.10\.0.*pip install --upgrade torch torchvision"):
        blame_packages(caught.value)
    with pytest.raises(ModuleNotFoundError) as caught:
        imported("no module named other")
    blame_packages(caught.value)


def test_pre_releases_of_containers_are_taken_for_a_pair():
    (verdict,) = judged({"torch": "2.6.0a0+ecf3bae40a.nv25.1", "torchvision": "0.20.0a0"})
    assert verdict.status == "ok"


def test_versions_come_from_installed_metadata(tmp_path, monkeypatch):
    install(tmp_path, "deepspeed", "0.18.1")
    install(tmp_path, "flash-attn", "2.8.2")
    install(tmp_path, "torch", "2.6.0")
    monkeypatch.syspath_prepend(tmp_path)
    found = {verdict.name: verdict.status for verdict in judge_pairs(version_of)}
    assert found["deepspeed"] == "broken"
    assert found["flash-attn and torch"] == "warning"
