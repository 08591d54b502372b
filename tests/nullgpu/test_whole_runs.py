"""Whole runs on a null card: no call that CUDA refuses, no capture that fails, and graphs that are replayed."""

import json

import pytest

from tests.nullgpu.card import ROOT, on_card
from tests.nullgpu.checks import failed
from tests.tiny_models import FAMILY_NAMES

pytestmark = pytest.mark.nullgpu
RESULTS = ROOT / "benchmarks/results/gpu_null.json"  # lower a number here when it falls
KNOWN = json.loads(RESULTS.read_text(encoding="utf-8"))
AS_A_RULE_NONE = {"looks": 0, "pageable_in_transformers": 0}
WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
CASES = (
    *(f"{family}: {name}" for name in ("plain", "compiled", "deterministic") for family in FAMILY_NAMES),
    *(f"{family}: nf4" for family in FAMILY_NAMES if family not in WITH_EXPERTS),
    "compiled by default",
    "int8",
    "full",
    "full, compiled",
    "checkpointing",
    "checkpointing, compiled",
    "selective checkpointing",
    "KL in the loss, entropy",
    "KL in the reward",
    "sampling, stop",
    "rows that leave",
    "workers",
    "float16",
    "float32",
    "8-bit moments",
    "paged moments",
    "DoRA",
    "adapters in the tower",
    "repeated",
    "dense",
    "evaluation",
    "off policy",
    "SFT",
    "SFT, compiled",
)


@pytest.mark.parametrize("case", CASES)
def test_a_run_ends_and_nothing_is_refused(case):
    (found,) = on_card("h100", "whole_runs", case)
    assert failed(found) == [], found
    if not case.startswith("SFT"):
        assert found["graphs"] > 0 and found["replays"] > 0
    for number, most in (AS_A_RULE_NONE | KNOWN.get(case, {})).items():
        assert found[number] <= most, f"{number} may only fall; {RESULTS} has the most"


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("a wait in the capture", "no capture is broken"),
        ("a wait in the decode loop", "tokens are drawn without a wait"),
        ("an allocation in the capture", "a capture allocates little"),
        ("copies from pageable memory", "copies come from pinned memory"),
    ],
)
def test_a_planted_fault_is_seen_by_its_check(fault, check):
    (found,) = on_card("h100", "whole_runs", fault)
    assert failed(found) == [check], found


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_four_bits_are_refused_for_experts(family):
    with pytest.raises(AssertionError, match="bitsandbytes quantises only linear layers"):
        on_card("h100", "whole_runs", f"{family}: nf4")


def test_without_a_c_compiler_a_run_continues_uncompiled(tmp_path):
    settings = {"CC": "/bin/false", "TRITON_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    (found,) = on_card("h100", "whole_runs", "compiled by default", **settings)
    assert failed(found) == [] and found["token_nodes"] == KNOWN["qwen2_5_vl: plain"]["token_nodes"]


def test_tensors_of_two_devices_end_the_run():
    with pytest.raises(AssertionError, match="same device"):
        on_card("h100", "whole_runs", "tensors of two devices")
