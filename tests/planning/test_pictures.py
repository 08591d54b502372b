"""The host's memory of a step's pictures, worked by hand."""

from types import SimpleNamespace

import pytest

from tiercel.planning.memory import picture_bytes
from tiercel.planning.probe import VisionBytes


@pytest.mark.parametrize(
    ("workers", "lookahead", "expected"),
    (
        (2, 0, 7_803_371_520),  # 512 prompts, each 1,296 tokens of 28 x 28 pixels in 3 bytes: 3,048,192; 5 steps
        (0, 0, 3_121_348_608),  # 2 steps
        (2, 2, 10_924_720_128),  # 7 steps
    ),
)
def test_512_prompts_of_a_megapixel_for_any_number_of_completions(workers, lookahead, expected):
    recipe = SimpleNamespace(data=SimpleNamespace(workers=workers))
    rollout = SimpleNamespace(prompts=512, prompt_tokens=1296, lookahead=lookahead)
    assert picture_bytes(recipe, rollout, VisionBytes()) == expected
