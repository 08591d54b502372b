"""`rollout.vllm.options` on a real engine: those that are taken change no logprob, and others are refused by name."""

import pytest

from tests.vllm.servers import run_tiercel
from tests.vllm.test_runs import finished, require_small_gaps, require_whole

pytestmark = pytest.mark.vllm
TAKEN = {
    "scheduling": {"max_num_seqs": 3, "max-num-batched-tokens": 512, "enforce_eager": True, "kv_cache_dtype": "auto"},
    "caching": {"enable_prefix_caching": False, "block_size": 32, "mm_processor_cache_gb": 0},
}


@pytest.mark.parametrize("kind", TAKEN)
def test_options_of_the_engine_change_no_logprob(kind, write_recipe):
    rollout = {"engine": "vllm", "group_size": 8, "vllm": {"options": TAKEN[kind]}}
    run = finished(write_recipe("qwen2_5_vl", rollout=rollout, train={"steps": 3}))
    require_small_gaps(run, 3)
    require_whole(run, 3, group_size=8)


def test_an_option_that_vllm_does_not_know_ends_with_its_name(write_recipe):
    recipe = write_recipe("qwen2_5_vl", rollout={"engine": "vllm", "vllm": {"options": {"max_num_sequences": 3}}})
    ended = run_tiercel("grpo", recipe)
    assert ended.returncode == 2, ended.stderr[-3000:]
    assert "rollout.engine: vllm does not start" in ended.stderr and "max_num_sequences" in ended.stderr
