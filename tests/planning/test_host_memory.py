"""The host's memory of a step's pictures, worked by hand."""

from types import SimpleNamespace

import pytest

from tiercel.planning.memory import picture_bytes
from tiercel.planning.probe import VisionBytes

MEGAPIXEL = 1337  # tokens, each of 28 x 28 pixels of three bytes: 3.14 MB


@pytest.mark.parametrize(("workers", "steps", "megabytes"), ((0, 2, 6.3), (4, 5, 15.7)))
def test_a_prompt_with_a_megapixel_takes_16_mb_whatever_the_number_of_completions(workers, steps, megabytes):
    """Two steps are held, and with workers three more; each asynchronous step of a rollout ahead is one more."""
    recipe = SimpleNamespace(data=SimpleNamespace(workers=workers))
    one, many, ahead = (
        picture_bytes(recipe, SimpleNamespace(lookahead=ahead, prompts=prompts, prompt_tokens=MEGAPIXEL), VisionBytes())
        for prompts, ahead in ((1, 0), (512, 0), (1, 1))
    )
    assert one == steps * MEGAPIXEL * 28 * 28 * 3 == pytest.approx(megabytes * 1e6, rel=0.01)
    assert many == 512 * one and many < 8.1e9  # verl 7391 tells of 431 GB
    assert ahead * steps == one * (steps + 1)
