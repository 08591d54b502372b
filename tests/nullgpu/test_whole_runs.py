"""Whole runs on a null card: no call that CUDA refuses, no capture that fails, and graphs that are replayed."""

import pytest

from tests.nullgpu.card import on_card
from tests.tiny_models import FAMILY_NAMES

pytestmark = pytest.mark.nullgpu
CASES = (
    *(f"{family}: {name}" for name in ("plain", "compiled", "deterministic", "nf4") for family in FAMILY_NAMES),
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
    assert (found["broken"], found["refused"], found["nvrtc"]) == ([], [], 0)
    assert found["default_stream"]
    if not case.startswith("SFT"):
        assert found["graphs"] > 0 and found["replays"] > 0


def test_a_capture_that_breaks_leaves_the_stream_of_before():
    (found,) = on_card("h100", "whole_runs", "a wait in the capture")
    assert found["broken"] and found["default_stream"] and found["replays"] == 0
