"""The host's memory: what a step's pictures take, worked by hand, and what a container leaves."""

from types import SimpleNamespace

import pytest
import torch

from tiercel.cli.plan import host_memory
from tiercel.doctor import machine
from tiercel.planning.devices import DEVICES
from tiercel.planning.memory import picture_bytes
from tiercel.planning.probe import VisionBytes
from tiercel.training.strategy_choice import _machine

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


@pytest.mark.parametrize(("limits", "expected"), (([], 10**12), ([64 * 10**9, 32 * 10**9], 32 * 10**9)))
def test_the_limit_of_a_container_is_the_memory_of_its_machine(monkeypatch, limits, expected):
    monkeypatch.setattr(machine, "total_memory", lambda: 10**12)
    monkeypatch.setattr(machine, "memory_limits", lambda: limits)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert host_memory(8, DEVICES["h100"]) == expected
    assert _machine(SimpleNamespace(world_size=8), torch.device("cuda"), 80 * 10**9).host_bytes == expected
