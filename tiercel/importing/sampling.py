"""Converting sampling and the loss: engines, correction, clipping, advantages, the reference."""

from typing import Any

from tiercel.importing.draft import RecipeDraft, whole_number_of

_MASKS_OVERLONG = ("overlong_filter", "mask_truncated_completions")


def set_sampling(draft: RecipeDraft) -> None:
    """Set how completions are sampled, and how the policy learns from them."""
    sampled = (_top_k, _engine, _length)
    learnt = (_correction, _loss, _clips, _advantage, _reference, _penalty, _switches, _rloo)
    for step in {"grpo": (*sampled, *learnt), "distill": sampled}.get(draft.launch.kind, ()):
        step(draft)


def _top_k(draft: RecipeDraft) -> None:
    launch = draft.launch
    if launch.framework == "VLM-R1":
        draft.set("rollout.top_k", 50, "--top_k", remark="transformers' default, with which VLM-R1 samples")
        return
    value = int(launch.real("top_k") or 0)
    if value > 0 or "top_k" in launch.flags:
        draft.set("rollout.top_k", max(0, value), "--top_k")


def _engine(draft: RecipeDraft) -> None:
    launch = draft.launch
    if not launch.is_true("use_vllm"):
        if "use_vllm" in launch.flags:
            draft.set("rollout.engine", "local", "--use_vllm")
        return
    mode = launch.text("vllm_mode") or ("server" if "vllm_server_host" in launch.flags else "colocate")
    if mode == "server":
        _servers(draft)
        return
    draft.set("rollout.engine", "vllm", "--use_vllm", "--vllm_mode")
    share, size = launch.real("vllm_gpu_memory_utilization"), launch.number("vllm_tensor_parallel_size")
    level = launch.text("sleep_level")
    if share:
        remark = "" if "vllm_gpu_memory_utilization" in launch.flags else f"{launch.framework}'s default"
        draft.set("rollout.vllm.gpu_memory_utilization", share, "--vllm_gpu_memory_utilization", remark=remark)
    if size and "vllm_tensor_parallel_size" in launch.flags:
        draft.set("rollout.vllm.tensor_parallel", size, "--vllm_tensor_parallel_size")
    if level and "sleep_level" in launch.flags:
        draft.set("rollout.vllm.sleep_level", whole_number_of("--sleep_level", level), "--sleep_level")
    elif launch.is_true("vllm_enable_sleep_mode"):
        draft.set("rollout.vllm.sleep_level", 1, "--vllm_enable_sleep_mode")


def _servers(draft: RecipeDraft) -> None:
    launch = draft.launch
    labels = ("--vllm_server_base_url", "--vllm_server_host", "--vllm_server_port")
    addresses = list(launch.words("vllm_server_base_url"))
    if not addresses:
        hosts = [host.replace("0.0.0.0", "127.0.0.1") for host in launch.words("vllm_server_host")] or ["127.0.0.1"]
        ports = list(launch.words("vllm_server_port"))
        ports = ports if len(ports) == len(hosts) else ports[:1] * len(hosts)
        addresses = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    draft.set("rollout.engine", "vllm-server", "--use_vllm", "--vllm_mode")
    draft.set("rollout.urls", addresses, *labels)
    if patience := launch.real("vllm_server_timeout"):
        draft.set("rollout.patience", patience, "--vllm_server_timeout", remark="seconds without an answer")
    if launch.is_true("async_generate"):
        draft.set("rollout.lookahead", 1, "--async_generate")


def _correction(draft: RecipeDraft) -> None:
    """Set the correction for the difference between the engine's and the trainer's probabilities; in TRL it is on."""
    launch, key = draft.launch, "algorithm.correction"
    names: tuple[str, ...]
    if launch.method == "rloo":
        return
    if launch.framework == "TRL":
        names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
        is_on = launch.is_true("vllm_importance_sampling_correction") and launch.is_true("use_vllm")
        mode, cap = launch.text(names[0]), launch.real(names[2]) or launch.real(names[1])
    else:
        names = ("rollout_importance_sampling_mode", "rollout_importance_sampling_threshold")
        mode, cap = launch.text(names[0]), launch.real(names[1])
        is_on = mode is not None and launch.is_true("use_vllm")
    labels = [f"--{name}" for name in ("vllm_importance_sampling_correction", *names)]
    if not is_on or mode is None:
        if launch.is_true("async_generate"):
            draft.set(f"{key}.level", "token", "--async_generate", remark="completions of an older policy need it here")
            draft.note(
                "learns from older completions without a correction there; here algorithm.correction is on",
                "--async_generate",
            )
        return
    remark = "" if any(label in draft.given for label in labels) else f"{launch.framework}'s default"
    level, _, form = mode.partition("_")
    draft.set(f"{key}.level", level, *labels, remark=remark)
    draft.set(f"{key}.mode", form or "truncate", *labels, remark=remark)
    if cap:
        draft.set(f"{key}.cap", cap, *labels, remark=remark)
    if form == "mask":
        draft.note("here ratios below 1 / cap are masked too", *labels, subject="algorithm.correction.mode: mask")
    if is_on and (draft.values.get("rollout.top_k") or draft.values.get("rollout.top_p", 1) < 1):
        for part in ("level", "mode", "cap"):
            draft.drop(f"{key}.{part}")
        draft.note("top_p and top_k cut the engine's probabilities, so no correction is taken", *labels, subject=key)


def _loss(draft: RecipeDraft) -> None:
    """Set the loss. The level of the ratio is part of the loss's name in tiercel."""
    launch = draft.launch
    if launch.method == "rloo":
        return
    level, loss = launch.text("importance_sampling_level") or "token", launch.text("loss_type") or "grpo"
    labels = ("--importance_sampling_level", "--loss_type")
    by_level = {"sequence": "gspo", "sequence_token": "gspo_token"}.get(level)
    remark = "" if "loss_type" in launch.flags or by_level else f"{launch.framework}'s default"
    if by_level == "gspo" and draft.values.get("algorithm.top_entropy", 1) < 1:
        by_level = "gspo_token"
        draft.note("tokens are chosen by entropy, so each has a ratio of its own: gspo_token", labels[0])
    if by_level is None:
        draft.set("algorithm.loss", loss, *labels, remark=remark)
        return
    draft.set("algorithm.loss", by_level, *labels)
    means = {"bnpo": "token", "dapo": "token", "dr_grpo": "constant"}
    if loss in means:
        draft.set("algorithm.normalise", means[loss], "--loss_type", remark=_said(draft, "loss_type"))
    elif loss != "grpo":
        draft.note(f"with --importance_sampling_level {level} it is {by_level} here", "--loss_type")


def _said(draft: RecipeDraft, flag: str) -> str:
    return "" if flag in draft.launch.flags else f"{draft.launch.framework}'s default of --{flag}"


def _clips(draft: RecipeDraft) -> None:
    launch = draft.launch
    loss = launch.text("loss_type")
    gates = {"gate_positive": ("tau_pos", "sapo_temperature_pos"), "gate_negative": ("tau_neg", "sapo_temperature_neg")}
    if loss == "sapo":
        for key, names in gates.items():
            if (value := launch.real(names[0] if names[0] in launch.rows else names[1])) is not None:
                draft.set(f"algorithm.{key}", value, *(f"--{name}" for name in names))
        return
    low, high = launch.real("epsilon"), launch.real("epsilon_high")
    if loss == "cispo":
        draft.set("algorithm.clip_low", None, "--epsilon", remark="cispo has no lower bound there")
        bound = launch.real("epsilon") if high is None else high
        remark = "the largest weight itself there"
        if bound and bound > 1:
            draft.set("algorithm.clip_high", round(bound - 1, 12), "--epsilon_high", remark=remark)
        return
    if low is not None:
        draft.set("algorithm.clip_low", low, "--epsilon")
        draft.set("algorithm.clip_high", low, "--epsilon")
    if high is not None:
        draft.set("algorithm.clip_high", high, "--epsilon_high")


def _advantage(draft: RecipeDraft) -> None:
    launch = draft.launch
    if launch.method == "rloo":
        return
    estimator, scale = launch.text("advantage_estimator"), launch.text("scale_rewards")
    names = {"grpo": "group_norm", "reinforce_plus_plus": "reinforce_pp_baseline", "rloo": "rloo", "gdpo": "gdpo"}
    labels = ("--advantage_estimator", "--scale_rewards", "--multi_objective_aggregation")
    advantage = names.get(estimator or "grpo", estimator)
    if scale == "gdpo" or launch.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "gdpo"
    if advantage != "group_norm" or "advantage_estimator" in launch.flags:
        draft.set("algorithm.advantage", advantage, *labels)
    word = {"true": "group", "false": "none"}.get((scale or "").lower(), scale)
    if advantage in ("reinforce_pp_baseline", "gdpo"):
        if word not in (None, "gdpo", "batch") and "scale_rewards" in launch.flags:
            draft.note(f"{advantage} has its own scale here, that of the step", "--scale_rewards")
    elif word is not None and "scale_rewards" in launch.flags:
        draft.set("algorithm.scale", word, "--scale_rewards")


def _reference(draft: RecipeDraft) -> None:
    """Set the reference. Its steps and its mix count only where --sync_ref_model is on."""
    launch = draft.launch
    if launch.is_true("sync_ref_model"):
        updates = int(draft.values.get("optim.minibatches", 1)) * int(draft.values.get("optim.rollout_epochs", 1))
        every = max(1, round((launch.number("ref_model_sync_steps") or 512) / updates))
        draft.set("algorithm.kl.sync_every", every, "--ref_model_sync_steps", "--sync_ref_model")
        draft.set("algorithm.kl.sync_mix", launch.real("ref_model_mixup_alpha"), "--ref_model_mixup_alpha")


def _penalty(draft: RecipeDraft) -> None:
    """Set the place of the KL penalty. In the reward it is a sum of log-ratios."""
    launch = draft.launch
    by_estimator = launch.text("advantage_estimator") in ("rloo", "reinforce_plus_plus")
    is_in_reward = launch.is_true("kl_in_reward") if launch.text("kl_in_reward") else by_estimator
    if not draft.values.get("algorithm.kl.coef", 0):
        return
    if is_in_reward or launch.method == "rloo":
        remark = "" if "kl_in_reward" in launch.flags else f"{launch.framework}'s default with this estimator"
        draft.set("algorithm.kl.place", "reward", "--kl_in_reward", "--advantage_estimator", remark=remark)
        draft.set("algorithm.kl.estimator", "k1", "--kl_in_reward", remark="the log-ratio itself")
    elif "kl_in_reward" in launch.flags:
        draft.set("algorithm.kl.place", "loss", "--kl_in_reward")


def _switches(draft: RecipeDraft) -> None:
    launch = draft.launch
    for name in _MASKS_OVERLONG:
        if name in launch.flags:
            draft.set("algorithm.overlong", "mask" if launch.is_true(name) else "keep", f"--{name}")
    if launch.is_true("dynamic_sample"):
        tries = launch.number("max_resample_times") or 3
        draft.set("rollout.resample_tries", tries, "--max_resample_times", "--dynamic_sample")
    elif "dynamic_sample" in launch.flags:
        draft.set("rollout.resample_tries", 0, "--dynamic_sample")
    if "async_generate" in launch.flags and not launch.is_true("async_generate"):
        draft.set("rollout.lookahead", 0, "--async_generate")


def _length(draft: RecipeDraft) -> None:
    launch = draft.launch
    if "max_new_tokens" in launch.flags and "max_completion_length" not in launch.flags:
        draft.set("rollout.max_new_tokens", launch.number("max_new_tokens"), "--max_new_tokens")


def _rloo(draft: RecipeDraft) -> None:
    """Set what TRL's RLOO trainer does: leave-one-out advantages, and the sum of a completion's logprobs."""
    if draft.launch.method != "rloo":
        return
    values: dict[str, Any] = {
        "algorithm.advantage": "rloo",
        "algorithm.loss": "grpo",
        "algorithm.normalise": "constant",
    }
    for key, value in values.items():
        draft.set(key, value, remark="what its RLOO trainer does")
    draft.note(
        "its loss is the sum over a completion's tokens, here that sum / rollout.max_new_tokens; AdamW does not see "
        "the factor, optim.max_grad_norm does",
        subject="algorithm.normalise: constant",
    )
    if draft.launch.is_true("normalize_advantages"):
        draft.set("algorithm.scale", "batch", "--normalize_advantages")
