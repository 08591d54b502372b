"""The plan of a full-size model is within 5 % of what PyTorch's own allocator takes, in a run of two steps."""

from functools import cache

import pytest

from benchmarks.gpu_memory import LIMIT, PHASES, Row, compared, difference
from tiercel.planning.memory import FRAGMENTATION

pytestmark = pytest.mark.nullgpu
NF4 = "7B, nf4, full checkpointing"
CASES = ("7B", "7B, full checkpointing", "7B, not compiled", NF4)
HOLDS_MORE = pytest.mark.xfail(strict=True, reason="with nf4 the allocator holds 6 % more, and 5 % are assumed")


@cache
def measured(case: str) -> Row:
    return compared(case, {})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("phase", PHASES)
def test_the_plan_is_within_a_twentieth(case, phase):
    assert abs(difference(measured(case), phase)) <= LIMIT


@pytest.mark.parametrize("case", (*CASES[:-1], pytest.param(NF4, marks=HOLDS_MORE)))
def test_what_the_allocator_holds_to_learn_is_within_the_fragmentation_that_is_assumed(case):
    row = measured(case)
    assert row["allocator"]["learn"]["reserved"] <= (1 + FRAGMENTATION) * sum(row["plan"]["learn"].values())
