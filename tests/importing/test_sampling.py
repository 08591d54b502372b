"""Engines, the loss and what is around it."""

import pytest

from tests.importing.helpers import GRPO, REC, TRL, drafted, told, values_of
from tests.importing.shapes import TRL as TRL_COMMAND

LORA = f"{TRL} --use_peft"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{GRPO} --advantage_estimator rloo --beta 0.04",
         {"algorithm.advantage": "rloo", "algorithm.kl.place": "reward", "algorithm.kl.estimator": "k1"}),
        (f"{GRPO} --advantage_estimator rloo --beta 0.04 --kl_in_reward false",
         {"algorithm.kl.place": "loss", "algorithm.kl.estimator": None}),
        (f"{GRPO} --advantage_estimator rloo --beta 0", {"algorithm.kl.place": None}),
        (f"{GRPO} --ref_model_sync_steps 64 --sync_ref_model true",
         {"algorithm.kl.sync_every": 64, "algorithm.kl.sync_mix": 0.6}),
        (f"{GRPO} --sync_ref_model false --ref_model_sync_steps 64", {"algorithm.kl.sync_every": None}),
        (f"{GRPO} --importance_sampling_level sequence", {"algorithm.loss": "gspo"}),
        (f"{GRPO} --importance_sampling_level sequence_token", {"algorithm.loss": "gspo_token"}),
        (f"{GRPO} --importance_sampling_level token --loss_type grpo", {"algorithm.loss": "grpo"}),
        (f"{GRPO} --importance_sampling_level sequence --top_entropy_quantile 0.2", {"algorithm.loss": "gspo_token"}),
        (f"{LORA} --importance_sampling_level sequence", {"algorithm.loss": "gspo", "algorithm.normalise": "token"}),
        (f"{GRPO} --loss_type sapo --tau_pos 1 --tau_neg 1.1 --epsilon 0.2",
         {"algorithm.gate_negative": 1.1, "algorithm.clip_low": None}),
        (f"{GRPO} --scale_rewards gdpo", {"algorithm.advantage": "gdpo", "algorithm.scale": None}),
        (f"{GRPO} --scale_rewards none", {"algorithm.scale": "none"}),
        (f"{GRPO} --overlong_filter true", {"algorithm.overlong": "mask"}),
        (f"{GRPO} --overlong_filter false", {"algorithm.overlong": "keep"}),
        (f"{GRPO} --dynamic_sample true", {"rollout.resample_tries": 3}),
        (f"{GRPO} --dynamic_sample false", {"rollout.resample_tries": 0}),
        (f"{GRPO} --top_k -1", {"rollout.top_k": 0}),
        (f"{GRPO} --max_new_tokens 300", {"rollout.max_new_tokens": 300}),
        (f"{GRPO} --async_generate false", {"rollout.lookahead": 0}),
        (f"{GRPO} --async_generate true --use_vllm true --vllm_mode server",
         {"rollout.lookahead": 1, "algorithm.correction.level": "token"}),
        (REC, {"rollout.top_k": 50, "rollout.temperature": None}),
        (f"{GRPO} --use_vllm true --vllm_mode colocate",
         {"rollout.engine": "vllm", "rollout.vllm.gpu_memory_utilization": 0.9}),
        (f"{GRPO} --use_vllm true --vllm_mode server --vllm_server_host a b --vllm_server_port 1 2",
         {"rollout.engine": "vllm-server", "rollout.urls": ["http://a:1", "http://b:2"]}),
        (f"{LORA} --use_vllm",
         {"rollout.engine": "vllm", "algorithm.correction.level": "sequence", "algorithm.correction.mode": "mask",
          "algorithm.correction.cap": 3.0}),
        (f"{LORA} --use_vllm --vllm_importance_sampling_correction false", {"algorithm.correction.level": None}),
        (f"{LORA} --use_vllm --top_p 0.9", {"algorithm.correction.level": None, "rollout.top_p": 0.9}),
        (f"{GRPO} --use_vllm true --vllm_mode colocate --rollout_importance_sampling_mode token_truncate",
         {"algorithm.correction.level": "token", "algorithm.correction.mode": "truncate",
          "algorithm.correction.cap": 2.0}),
        (f"{GRPO} --num_iterations 2 --top_p 0.9", {"rollout.top_p": 1.0, "optim.rollout_epochs": 2}),
    ],
)  # fmt: skip
def test_what_is_sampled_and_learnt(line, expected):
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected


def test_cispo_gives_the_largest_weight_itself():
    values = values_of(TRL_COMMAND)
    assert values["algorithm.clip_low"] is None and values["algorithm.clip_high"] == 4.0


def test_what_differs_in_sampling_is_told():
    assert "ratio is not defined for tokens that a cut removes" in told(
        drafted(f"{GRPO} --num_iterations 2 --top_p 0.9")
    )
    assert "ratios below 1 / cap are masked too" in told(drafted(f"{LORA} --use_vllm"))
    assert "so no correction is taken" in told(drafted(f"{LORA} --use_vllm --top_k 5"))
    assert "start a plain vLLM" in told(drafted(f"{GRPO} --use_vllm true --vllm_mode server"))


def test_trls_rloo():
    values = values_of("trl rloo --model_name_or_path org/m --dataset_name r.jsonl --reward_funcs accuracy_reward")
    assert values["algorithm.advantage"] == "rloo" and values["algorithm.normalise"] == "constant"
    assert values["algorithm.kl.coef"] == 0.05 and values["algorithm.kl.place"] == "reward"
    assert values["rollout.group_size"] == 2 and values["optim.prompts_per_step"] == 4  # 8 completions / 2
