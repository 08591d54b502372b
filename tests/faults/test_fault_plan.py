"""Faults happen where the plan says, once, and nowhere else."""

import math
import subprocess
import sys

import pytest
import torch

from benchmarks.faults.fault_plan import Fault, planning, with_plan
from tiercel.reliability.faults import faults


def test_nothing_happens_without_a_plan():
    value = torch.ones(3)
    assert faults().maybe_corrupt(value, "loss", 1, 0) is value
    assert not faults().maybe_fail("learn", 1, 0)


def test_a_value_is_spoilt_once_at_its_step_and_on_its_rank():
    with planning([Fault(site="loss", kind="nan", step=2, rank=1)]):
        assert faults().maybe_corrupt(1.0, "loss", 1, 1) == 1.0
        assert faults().maybe_corrupt(1.0, "loss", 2, 0) == 1.0
        assert faults().maybe_corrupt(1.0, "gradient", 2, 1) == 1.0
        assert math.isnan(faults().maybe_corrupt(1.0, "loss", 2, 1))
        assert faults().maybe_corrupt(1.0, "loss", 2, 1) == 1.0


def test_a_collective_is_left_out_at_any_step():
    with planning([Fault(site="collective", kind="skip")]):
        assert faults().maybe_fail("collective", 5, 0)
        assert not faults().maybe_fail("collective", 6, 0)


@pytest.mark.parametrize(("kind", "code"), (("kill", -9), ("term", -15), ("exit", 1)))
def test_a_process_ends_as_planned(kind, code):
    script = "from tiercel.reliability.faults import faults; faults().maybe_fail('save', 3, 0); print('went on')"
    plan = f'[{{"site": "save", "kind": "{kind}", "step": 3}}]'
    done = subprocess.run(
        [sys.executable, "-c", script], env=with_plan(plan), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert f"fault plan: {kind} at save, step 3, rank 0" in done.stderr
    assert "but kept running" not in done.stdout
