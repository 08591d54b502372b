"""Texts of public reports, from cards, drivers and compilers that did not fit, are recognised."""

import sys

import pytest

from tests.training.test_loops import grpo_recipe
from tiercel.doctor.trials import Outcome, judge
from tiercel.errors import EnvironmentProblem
from tiercel.reliability.card_faults import FAULTS, card_fault, triton_errors
from tiercel.training.run import plain_failures

TEXTS = {
    # https://github.com/pytorch/pytorch/issues/180278
    "RuntimeError: No valid triton configs.\nOutOfMemoryError: out of resource: triton_tem_fused_flex_attention_0\n"
    "Required: 139776  Hardware limit: 101376\nReducing block sizes or num_stages may help.": "shared-memory",
    # https://github.com/sgl-project/SpecForge/issues/194
    "RuntimeError: No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0 Required: 107008 "
    "Hardware limit:101376 Reducing block sizes or `num_stages` may help.": "shared-memory",
    # https://github.com/triton-lang/triton/issues/8182
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` "
    "may help.": "shared-memory",
    # https://github.com/triton-lang/triton/issues/8539
    "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Value 'sm_121a' is not defined "
    "for option 'gpu-name'": "ptxas",
    # https://github.com/triton-inference-server/server/issues/8632
    "No valid triton configs. PTXASError: PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
    "ptxas-blackwell fatal   : Value 'sm_110a' is not defined for option 'gpu-name'": "ptxas",
    # https://github.com/pytorch/pytorch/issues/58101
    "nvrtc: error: failed to open libnvrtc-builtins.so.11.1.\n  Make sure that libnvrtc-builtins.so.11.1 is installed "
    "correctly.": "nvrtc-library",
    # https://github.com/pytorch/pytorch/issues/47658
    "nvrtc: error: invalid value for --gpu-architecture (-arch)\n\nnvrtc compilation failed: \n\n#define NAN": "nvrtc",
    # https://github.com/lllyasviel/Fooocus/issues/1313
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx": "driver",
    # https://github.com/haotian-liu/LLaVA/issues/1418
    "CUDA error: the provided PTX was compiled with an unsupported toolchain.": "driver",
    "CUDA error: no kernel image is available for execution on the device": "architecture",
    # https://github.com/MIC-DKFZ/nnUNet/issues/2268
    "Failed to find C compiler. Please specify via CC environment variable.": "compiler",
    # https://github.com/pytorch/pytorch/issues/92745
    "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpj_1fdcu9/main.c', '-O3', '-I/opt/conda/include/"
    "python3.10', '-lcuda', '-o', '/tmp/tmpj_1fdcu9/triton_.so']' returned non-zero exit status 1.": "compiler",
    "No valid triton configs. CompilationError: at 12:4": "triton",
}


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_report_is_recognised_by_run_and_doctor(tmp_path, text):
    fault = card_fault(text)
    assert fault is not None and fault.code == TEXTS[text]
    recipe = grpo_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run")
    with pytest.raises(EnvironmentProblem) as caught, plain_failures(recipe):
        raise RuntimeError(f"backend='inductor' raised:\n{text}")
    assert fault.remedy in str(caught.value)
    verdict = judge(Outcome(step="float32", failure=f"RuntimeError: {text}"), "cuda")
    assert (verdict.status, verdict.remedy) == ("broken", fault.remedy)


def test_every_fault_has_a_report():
    assert set(TEXTS.values()) == {fault.code for fault in FAULTS}


def test_other_errors_are_not_taken_for_a_card():
    for text in ("CUDA out of memory. Tried to allocate 2.00 GiB", "shapes cannot be multiplied", "Address not found"):
        assert card_fault(text) is None


def test_errors_of_triton_are_caught_once_it_is_imported(tmp_path, monkeypatch):
    """They derive from Exception. Triton is not installed beside a build for the CPU."""

    class TritonError(Exception):
        pass

    class Module:
        pass

    Module.TritonError = TritonError
    monkeypatch.delitem(sys.modules, "triton.errors", raising=False)
    assert triton_errors() == ()
    monkeypatch.setitem(sys.modules, "triton.errors", Module)
    with (
        pytest.raises(EnvironmentProblem, match=r"learner\.form: dense"),
        plain_failures(grpo_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run")),
    ):
        raise TritonError("out of resource: shared memory, Required: 66560, Hardware limit: 65536.")
