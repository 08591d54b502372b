"""What is reported for errors that are not tiercel's own."""

import pytest
import torch

from tests.training.test_loops import grpo_recipe, sft_recipe
from tiercel.errors import TrainingError
from tiercel.training.run import plain_failures


def test_an_allocation_that_fails_on_a_cpu_is_out_of_memory_with_a_remedy(tmp_path):
    recipe = grpo_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run")
    with pytest.raises(TrainingError) as caught, plain_failures(recipe):
        torch.empty(2**50)
    for word in ("out of memory", "learner.max_tokens_per_microbatch", "rollout.prepacked_bytes: 0"):
        assert word in str(caught.value)
    with pytest.raises(TrainingError, match="out of memory: MemoryError"), plain_failures(recipe):
        raise MemoryError
    with pytest.raises(RuntimeError, match="shapes"), plain_failures(recipe):
        raise RuntimeError("shapes")


def test_sft_is_told_of_no_rollout(tmp_path):
    recipe = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", learner={"gradient_checkpointing": True})
    with pytest.raises(TrainingError) as caught, plain_failures(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "rollout" not in str(caught.value) and "checkpointing" not in str(caught.value)
