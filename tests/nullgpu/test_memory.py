"""The plan of a full-size model is within 5 % of what PyTorch's own allocator takes, in a run of two steps."""

import pytest

from benchmarks.gpu_memory import LIMIT, PHASES, compared, difference
from tiercel.planning.memory import FRAGMENTATION

pytestmark = pytest.mark.nullgpu
CASES = ("7B", "7B, not compiled", "7B, nf4, full checkpointing")


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_within_a_twentieth(case):
    row = compared(case, {})
    for phase in PHASES:
        assert abs(difference(row, phase)) <= LIMIT, phase
    learn = row["allocator"]["learn"]
    assert learn["reserved"] <= (1 + FRAGMENTATION) * max(learn["allocated"], sum(row["plan"]["learn"].values()))
