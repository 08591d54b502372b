"""Attention can be compiled for the cards that people have: it fits, and spills no more than the table says."""

import pytest

from benchmarks.kernels import HEADS, KEY_HEADS
from tests.nullgpu.card import CARDS, on_card
from tiercel.packing.kernel_table import fit_of, known_fits

pytestmark = pytest.mark.nullgpu


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("size", [64, 128, 256, 512])
def test_kernels_are_as_in_the_table(card, size):
    (found,) = on_card(card, "flex", f"{HEADS},{KEY_HEADS},{size},bfloat16")
    known = fit_of(known_fits(), tuple(found["capability"]), size, "bfloat16")
    assert (known.card, found["problem"], found["decoder"]["refused"]) == (card, known.problem, 0)
    spilled = [found[part]["stack_bytes"] for part in ("forward", "backward")]
    assert all(now <= then for now, then in zip(spilled, known.stack_bytes, strict=True)), spilled


def test_a_planted_option_that_does_not_fit_is_refused():
    (found,) = on_card("4090", "flex", "large tiles", f"{HEADS},{KEY_HEADS},256,bfloat16")
    assert "bytes of shared memory, and the card has 101,376" in found["problem"]
