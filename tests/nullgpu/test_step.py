"""A whole step of the 7B launches no more than it did."""

import pytest

from tests.nullgpu.card import on_card
from tests.nullgpu.test_whole_runs import KNOWN

pytestmark = pytest.mark.nullgpu


def test_launches_of_a_step_may_only_fall(tmp_path):
    (found,) = on_card("h100", "step", "7b", str(tmp_path / "log.json"))
    known = KNOWN["7b, a whole step"]
    assert found["token_nodes"] <= known["token_nodes"]
    assert all(found["launches"][phase] <= most for phase, most in known["launches"].items()), found
