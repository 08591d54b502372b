"""The learner's attention is compiled for the cards that people have: it fits, and keeps its values in registers."""

import pytest

from tests.nullgpu.card import CARDS, on_card

pytestmark = pytest.mark.nullgpu
# Bytes a thread that a kernel may spill to memory.
MOST_SPILLED = {"bfloat16": 256, "float16": 256, "float32": 512}


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("shape", ["14,2,64,bfloat16", "28,4,128,bfloat16", "16,4,256,bfloat16", "8,2,512,bfloat16"])
def test_kernels_fit(card, shape):
    (found,) = on_card(card, "flex", shape)
    assert found["problem"] == ""
    spilled = {name: found[name]["stack_bytes"] for name in ("forward", "backward")}
    assert max(spilled.values()) <= MOST_SPILLED[shape.rpartition(",")[2]], spilled
