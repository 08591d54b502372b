"""How long each phase may go without progress, and what is said of errors that are not tiercel's own."""

import pytest
import torch

from tests.training.test_loops import grpo_recipe, sft_recipe
from tiercel.errors import TrainingError
from tiercel.reliability.watchdog import ANY_PHASE
from tiercel.training.ending import phase_limits, plain_failures

STALL = {"stall_timeout": 100.0, "reward_timeout": 7.0}


def limits(tmp_path, **rollout) -> dict[str, float]:
    rows = tmp_path / "rows.jsonl"
    return phase_limits(grpo_recipe(tmp_path, rows, tmp_path / "run", reliability=STALL, rollout=rollout))


def test_rewards_have_their_own_timeouts_on_top(tmp_path):
    assert limits(tmp_path)["reward"] == 107.0  # one reward of the user's, one built-in


def test_rollouts_wait_for_servers_as_long_as_the_recipe_says(tmp_path):
    servers = {"engine": "vllm-server", "urls": ["http://127.0.0.1:1"], "patience": 50.0, "request_timeout": 20.0}
    assert limits(tmp_path, **servers)["rollout"] == 170.0
    assert limits(tmp_path)["rollout"] == 100.0


def test_what_tells_of_no_progress_has_thrice_the_time(tmp_path):
    assert limits(tmp_path)["load"] == limits(tmp_path)["save"] == 300.0
    assert limits(tmp_path)["engine"] == 400.0
    assert limits(tmp_path, engine="vllm")["rollout"] == 300.0


def test_an_evaluation_may_take_what_rollouts_and_rewards_may(tmp_path):
    assert limits(tmp_path, engine="vllm")["evaluation"] == 300.0
    assert limits(tmp_path)["evaluation"] == 107.0


def test_sft_has_no_phases_of_rollouts(tmp_path):
    recipe = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", reliability=STALL)
    assert phase_limits(recipe) == {ANY_PHASE: 100.0, "start": 300.0, "load": 300.0, "engine": 300.0, "save": 300.0}


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
