"""Two ranks on two null cards: they agree on their drivers, and run their strategy's own collectives."""

import pytest

from tests.nullgpu.card import on_card

pytestmark = pytest.mark.nullgpu
CASES = ("ddp", "ddp, full", "ddp, compiled", "fsdp2", "fsdp2, checkpointing", "context", "context, fsdp2")


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_end(case):
    (found,) = on_card("h100", "ranks", case, cards=2)
    assert found["codes"] == [0, 0], "\n".join(found["said"])
