"""Whole runs with a tool that returns pictures: counts, gaps, and bytes for any number of workers."""

from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.calling_models import save_calling_checkpoint
from tests.training.test_loops import run_grpo
from tests.training.turn_recipes import CALLS, records, turn_recipe
from tiercel.runs.directory import read_metrics

STEPS = 3
ANSWER = "\n<|im_start|>user\n<tool_response>ANSWER</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("calling")
    return save_calling_checkpoint(tiny_checkpoints["qwen2_5_vl"], directory, CALLS)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    return run_grpo(turn_recipe(checkpoint, tmp_path_factory.mktemp("whole"), "run"))


def test_each_token_is_counted_where_it_belongs(whole, checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    metrics = read_metrics(whole)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    for row in metrics:
        completions = [each for line in records(whole, row["step"]) for each in line["completions"]]
        turns = [turn for each in completions for turn in each["turns"]]
        calls = [each for turn in turns for each in turn["calls"]]
        sampled = sum(turn["stop"] - turn["start"] for turn in turns)
        assert row["tokens/completion"] == sampled == sum(each["tokens"] for each in completions)
        observed = 0
        for completion in completions:
            for before, after in pairwise(completion["turns"]):
                pictures = [image["processed_size"] for image in before["images"]]
                features = [width * height // 28**2 for width, height in pictures]
                shown = ["<|vision_start|>" + "<|image_pad|>" * count + "<|vision_end|>" for count in features]
                answer = before["answer"].replace("<image>", *shown) if shown else before["answer"]
                # A call ends with a stop string, so the template's end of the turn is observed together with the
                # answer.
                ids = tokenizer("<|im_end|>" + ANSWER.replace("ANSWER", answer))["input_ids"]
                assert completion["token_ids"][before["stop"] : after["start"]] == ids
                observed += len(ids)
        assert row["tokens/observed"] == observed == sum(len(each["token_ids"]) for each in completions) - sampled
        assert row["turns/mean"] == len(turns) / len(completions) > 1.5
        assert row["tools/look/calls"] == sum(each["name"] == "look" for each in calls) > 10
        assert row["tools/failed_fraction"] == sum(each["failure"] is not None for each in calls) / len(calls) > 0
        assert row["environment/failed"] == 0 and row["grad_norm"] > 0
        assert row["sampler/logprob_gap_max"] < 1e-4


def trained(run: Path) -> dict[str, bytes]:
    """Trajectories, the last adapter and its moments."""
    last = run / f"checkpoints/step-{STEPS:06d}"
    files = [*run.glob("rollouts/*.jsonl"), *last.rglob("*.safetensors")]
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("workers", (1, pytest.param(4, marks=pytest.mark.catalogue)))
def test_workers_change_no_byte(checkpoint, tmp_path, whole, workers):
    """The run to compare with encodes rows in the trainer's own process."""
    expected = trained(whole)
    assert len(expected) == STEPS + 2
    assert trained(run_grpo(turn_recipe(checkpoint, tmp_path, "run", data={"workers": workers}))) == expected
