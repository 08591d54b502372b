"""Engines, the loss and the keys around it."""

import pytest
import torch

from tests.convert.helpers import GRPO, REC, TRL, drafted, told, values_of
from tests.convert.shapes import TRL as TRL_COMMAND

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
        (f"{LORA} --importance_sampling_level sequence --loss_type cispo --epsilon_high 5",
         {"algorithm.loss": "cispo", "algorithm.ratio": "sequence", "algorithm.clip_high": 4.0,
          "algorithm.normalise": None}),
        (f"{LORA} --importance_sampling_level sequence --loss_type sapo",
         {"algorithm.loss": "sapo", "algorithm.ratio": "sequence", "algorithm.gate_negative": None}),
        (f"{GRPO} --importance_sampling_level sequence_token --loss_type sapo",
         {"algorithm.loss": "sapo", "algorithm.ratio": "sequence_at_token"}),
        (f"{LORA} --beta 0.04", {"algorithm.kl.by_ratio": True, "algorithm.kl.coef": 0.04}),
        (LORA, {"algorithm.kl.estimator": None}),
        (f"{LORA} --beta 0.04 --use_bias_correction_kl false", {"algorithm.kl.estimator": None}),
        (f"{LORA} --beta 0.04 --importance_sampling_level sequence", {"algorithm.kl.by_ratio": None}),
        (f"{GRPO} --beta 0.04", {"algorithm.kl.by_ratio": None}),
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
        (f"{LORA} --use_vllm --vllm_importance_sampling_clip_min 0.2", {"algorithm.correction.floor": 0.2}),
        (f"{LORA} --use_vllm --vllm_importance_sampling_mode token_truncate", {"algorithm.correction.floor": None}),
        (f"{LORA} --use_vllm --vllm_importance_sampling_mode token_mask", {"algorithm.correction.floor": 0.0}),
        (f"{LORA} --loss_type luspo --importance_sampling_level sequence",
         {"algorithm.loss": "luspo", "algorithm.ratio": None, "algorithm.normalise": None}),
        (f"{LORA} --loss_type luspo", {"algorithm.loss": "luspo", "algorithm.ratio": "token"}),
        (f"{LORA} --loss_type luspo --importance_sampling_level sequence --top_entropy_quantile 0.2",
         {"algorithm.ratio": "sequence_at_token", "algorithm.top_entropy_of": "all"}),
        (f"{LORA} --loss_type vespo --vespo_k_pos 1.5 --vespo_lambda_neg 4 --epsilon 0.3",
         {"algorithm.loss": "vespo", "algorithm.gamma_power_positive": 1.5, "algorithm.gamma_rate_negative": 4.0,
          "algorithm.gamma_rate_positive": None, "algorithm.clip_low": None}),
        (f"{LORA} --vespo_k_pos 1.5", {"algorithm.gamma_power_positive": None}),
        (f"{LORA} --beta 0.04", {"algorithm.kl.by_ratio": True}),
        (f"{LORA} --beta 0.04 --use_bias_correction_kl false", {"algorithm.kl.by_ratio": None}),
        (f"{LORA} --beta 0", {"algorithm.kl.by_ratio": None}),
        (f"{GRPO} --beta 0.04", {"algorithm.kl.by_ratio": None}),
        (f"{LORA} --entropy_coef 0.01", {"algorithm.entropy_mean": "token", "algorithm.top_entropy_of": None}),
        (f"{LORA} --top_entropy_quantile 0.2", {"algorithm.top_entropy_of": "all", "algorithm.entropy_mean": None}),
    ],
)  # fmt: skip
def test_what_is_sampled_and_learnt(line, expected):
    values = values_of(line)
    assert {key: values.get(key) for key in expected} == expected


def test_cispo_gives_the_largest_weight_itself():
    values = values_of(TRL_COMMAND)
    assert values["algorithm.clip_low"] is None and values["algorithm.clip_high"] == 4.0


@pytest.mark.parametrize(
    ("flags", "value", "is_told"),
    [("--epsilon_high 1", 1e-6, False), ("--epsilon_high 0.8", 1e-6, True), ("--epsilon 0.2", 1e-6, True),
     ("", 1e-6, True), ("--epsilon_high 1.5", 0.5, False)],
)  # fmt: skip
def test_a_largest_weight_of_cispo_that_is_not_above_1(flags, value, is_told):
    draft = drafted(f"{LORA} --loss_type cispo {flags}")
    assert draft.values["algorithm.clip_high"] == value
    assert ("AdamW does not see a common factor" in told(draft)) == is_told


def test_a_penalty_weighted_by_the_ratio_of_completions_is_told():
    draft = drafted(f"{LORA} --beta 0.1 --importance_sampling_level sequence")
    assert "TRL weights the KL estimate by the completion's ratio" in told(draft)


def test_what_differs_in_sampling_is_told():
    assert "updates of a rollout their ratio is not defined" in told(drafted(f"{GRPO} --num_iterations 2 --top_p 0.9"))
    assert "TRL puts the correction into its ratio; tiercel" in told(drafted(f"{LORA} --use_vllm --loss_type vespo"))
    assert "so no correction is taken" in told(drafted(f"{LORA} --use_vllm --top_k 5"))
    assert "start a plain vLLM" in told(drafted(f"{GRPO} --use_vllm true --vllm_mode server"))


def test_trls_rloo():
    values = values_of("trl rloo --model_name_or_path org/m --dataset_name r.jsonl --reward_funcs accuracy_reward")
    assert values["algorithm.advantage"] == "rloo" and values["algorithm.normalise"] == "sequence"
    assert values["algorithm.ratio"] == "product"
    assert values["algorithm.kl.coef"] == 0.05 and values["algorithm.kl.place"] == "reward"
    assert values["rollout.group_size"] == 2 and values["optim.prompts_per_step"] == 4  # 8 completions / 2


def test_normalised_advantages_of_trls_rloo_are_those_of_reinforce_pp_baseline():
    line = "trl rloo --model_name_or_path org/m --dataset_name r.jsonl --reward_funcs accuracy_reward"
    values = values_of(f"{line} --normalize_advantages")
    assert values["algorithm.advantage"] == "reinforce_pp_baseline" and "algorithm.scale" not in values
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])  # two groups of three
    groups = rewards.view(2, 3)
    left_out = (rewards - ((groups.sum(1, keepdim=True) - groups) / 2).flatten()) * 1e4  # so that 1e-4 does not matter
    theirs = (left_out - left_out.mean()) / (left_out.std() + 1e-4)
    own = (groups - groups.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(theirs, own / own.std(), rtol=1e-5, atol=1e-6)
