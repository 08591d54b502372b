"""Verdicts on GPUs from what a child process would report about them."""

import pytest

from tiercel.doctor.machine import c_compiler, gpu_verdicts, has_code_for

H100 = {"name": "NVIDIA H100", "memory": 85_000_000_000, "capability": [9, 0]}
FACTS = {
    "built_for": "12.8",
    "is_cuda": True,
    "complaint": "",
    "driver": 12040,
    "architectures": ["sm_80", "sm_90", "compute_90"],
    "gpus": [H100],
}


def judged(has_driver=True, **changes):
    return gpu_verdicts({**FACTS, **changes}, has_driver=has_driver)


def test_a_gpu_that_the_build_has_code_for_is_well_under_a_driver_of_the_same_major():
    driver, gpu = judged()
    assert (driver.status, driver.found) == ("ok", "supports CUDA 12.4; torch is built for 12.8")
    assert (gpu.status, gpu.found) == ("ok", "NVIDIA H100, 85.0 GB, compute capability 9.0")


def test_a_driver_older_than_the_build_is_broken():
    driver, _ = judged(driver=12080, built_for="13.0")
    assert driver.status == "broken" and "upgrade the driver" in driver.remedy


def test_a_gpu_without_code_in_the_build_is_broken():
    _, gpu = judged(gpus=[{**H100, "name": "Tesla V100", "capability": [7, 0]}])
    assert gpu.status == "broken" and "only for sm_80 sm_90 compute_90" in gpu.found


def test_a_gpu_without_bfloat16_is_a_warning():
    _, gpu = judged(gpus=[{**H100, "name": "Tesla T4", "capability": [7, 5]}], architectures=["sm_75"])
    assert gpu.status == "warning" and gpu.remedy == "set model.dtype: float16"


def test_no_gpu_is_absent_without_a_driver_and_a_fault_with_one():
    (verdict,) = judged(has_driver=False, gpus=[], built_for=None)
    assert (verdict.status, verdict.found) == ("absent", "no NVIDIA driver; torch is built for the CPU")
    (verdict,) = judged(gpus=[], built_for=None)
    assert verdict.status == "warning" and "for CUDA" in verdict.remedy
    (verdict,) = judged(gpus=[], complaint="The NVIDIA driver on your system is too old (found version 11040).")
    assert verdict.status == "broken" and "too old" in verdict.found


def test_a_machine_without_a_c_compiler_or_pythons_headers_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict = c_compiler(None, tmp_path)
    assert (verdict.status, verdict.found) == ("warning", "not found: gcc, clang")
    assert "apt install gcc" in verdict.remedy
    assert c_compiler("icx", tmp_path).found == "not found: icx"
    clang = tmp_path / "clang"
    clang.touch(mode=0o755)
    verdict = c_compiler(None, tmp_path)
    assert (verdict.status, verdict.found) == ("warning", f"{clang}, but no Python.h in {tmp_path}")
    (tmp_path / "Python.h").touch()
    assert (c_compiler(None, tmp_path).status, c_compiler(str(clang), tmp_path).status) == ("ok", "ok")


@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["gfx942"], (9, 4), False),
    ],
)
def test_machine_code_runs_on_its_major_and_ptx_on_what_is_newer(architectures, capability, fits):
    assert has_code_for(architectures, capability) == fits


def test_heads_that_do_not_fit_a_card_are_named():
    """A block of the smallest tiles for heads of 512 numbers of 4 bytes needs more than 99 KB."""
    _, gpu = judged(gpus=[{**H100, "name": "NVIDIA GeForce RTX 4090", "capability": [8, 9]}])
    assert gpu.status == "ok" and "heads of 512 in float32" in gpu.found
    _, gpu = judged()
    assert "flex" not in gpu.found
