"""Environments and tools in the forms that TRL documents can be used in runs unchanged."""

import asyncio
from pathlib import Path

import pytest

from tests.calling_models import call, save_calling_checkpoint
from tests.environments import trl_examples
from tests.training.test_loops import run_grpo
from tests.training.turn_recipes import records, turn_recipe
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.catalogue
FILE = trl_examples.__file__


def run_of(tiny_checkpoints, directory: Path, calls: list[str], **changes) -> tuple[dict, list[dict]]:
    """Metrics and records of a step of a run whose policy makes these calls."""
    checkpoint = save_calling_checkpoint(tiny_checkpoints["qwen2_5_vl"], directory / "model", calls)
    run = run_grpo(turn_recipe(checkpoint, directory / "data", "run", train={"steps": 1}, **changes))
    return read_metrics(run)[0], records(run, 1)


def by_hand(game: trl_examples.WordGame, made: dict) -> tuple[str, str | None]:
    """Return what a call gives and why it fails, with the call made by the test itself."""
    tools = {"guess": game.guess, "multiply": trl_examples.multiply, "async_add": trl_examples.async_add}
    try:
        value = tools[made["name"]](**made["arguments"])
    except ValueError as error:
        return f"error: {error}", str(error)
    return str(asyncio.run(value) if asyncio.iscoroutine(value) else value), None


def test_a_text_game_beside_tools(tiny_checkpoints, tmp_path):
    guesses = [call("guess", guess=f"[{word}]") for word in (*trl_examples.WORDS, "no", "none")]
    sums = [call(name, a=a, b=7) for name in ("multiply", "async_add") for a in range(4)]
    rollout = {"environment": f"{FILE}:WordGame", "tools": [f"{FILE}:multiply", f"{FILE}:async_add"], "max_turns": 4}
    row, lines = run_of(tiny_checkpoints, tmp_path, guesses + sums, rollout=rollout)
    seen = set()
    for line in lines:
        assert line["prompt"].partition("<|im_end|>\n<|im_start|>assistant")[0].endswith("You have 2 tries.")
        for completion in line["completions"]:
            game = trl_examples.WordGame()
            game.reset(prompt=line["question"])
            for turn in completion["turns"]:
                for made in turn["calls"]:
                    assert not game.done
                    assert (turn["answer"], made["failure"]) == by_hand(game, made)
                    seen.add((made["name"], made["failure"] is None))
            assert completion["rewards"]["environment"] == game.get_reward()
    assert seen == {("guess", True), ("guess", False), ("multiply", True), ("async_add", True)}
    assert {f"tools/{name}/calls" for name, _ in seen} <= set(row)


def test_a_tool_that_returns_a_picture(tiny_checkpoints, tmp_path):
    calls = [call("shoot", width=width) for width in range(56, 96, 4)]
    rewards = [{"call": f"{tmp_path}/data/mine.py:variety"}]
    row, lines = run_of(tiny_checkpoints, tmp_path, calls, rewards=rewards, rollout={"environment": f"{FILE}:Camera"})
    for completion in (each for line in lines for each in line["completions"]):
        for number, turn in enumerate(completion["turns"][:-1], 1):  # after the last one, the policy saw no picture
            assert turn["answer"] == f"<image>shot {number}"
            assert turn["images"][0]["original_size"] == [turn["calls"][0]["arguments"]["width"], 60]
    assert row["tools/shoot/calls"] > 5 and row["tools/failed_fraction"] == row["environment/failed"] == 0
