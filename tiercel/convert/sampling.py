"""Convert sampling and the loss: engines, correction, clipping, advantages, the reference."""

from tiercel.algorithms.losses import LOSSES
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.table import words_of

# Of the correction for the engine's other probabilities.
_CAPS = ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "rollout_importance_sampling_threshold")
_CORRECTING = (
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_importance_sampling_mode", *_CAPS,
)  # fmt: skip
_LEAST_DISTANCE = 1e-6  # the least distance of cispo's bound from 1


def set_sampling(launch: Launch, draft: RecipeDraft) -> None:
    """Set how completions are sampled, and how the policy learns from them."""
    shared = (_reference, _penalty, _switches)
    learnt = {"grpo": (_correction, _loss, _clips, _advantage, *shared), "rloo": (_clips, *shared, _rloo)}
    if launch.kind in ("grpo", "distill"):
        for step in (_engine, _drawing, *learnt.get(launch.method, ())):
            step(launch, draft)


def _engine(launch: Launch, draft: RecipeDraft) -> None:
    mode = launch.text("vllm_mode") or ("server" if "vllm_server_host" in launch.flags else "colocate")
    if not launch.is_true("use_vllm"):
        draft.set("rollout.engine", "local", "use_vllm")
    elif mode == "server":
        _servers(launch, draft)
    else:
        draft.set("rollout.engine", "vllm", "use_vllm", "vllm_mode")


def _servers(launch: Launch, draft: RecipeDraft) -> None:
    addresses = list(launch.words("vllm_server_base_url"))
    if not addresses:
        hosts = [host.replace("0.0.0.0", "127.0.0.1") for host in launch.words("vllm_server_host")] or ["127.0.0.1"]
        ports = list(launch.words("vllm_server_port"))
        ports = ports if len(ports) == len(hosts) else ports[:1] * len(hosts)
        addresses = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    draft.set("rollout.engine", "vllm-server", "use_vllm", "vllm_mode")
    draft.set("rollout.urls", addresses, "vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    if launch.is_true("async_generate"):
        draft.set("rollout.lookahead", 1, "async_generate")


def _correction(launch: Launch, draft: RecipeDraft) -> None:
    """Set the correction for the difference between the engine's and the trainer's probabilities; in TRL it is on."""
    key, floor_name = "algorithm.correction", "vllm_importance_sampling_clip_min"
    is_on = launch.framework != "TRL" or launch.is_true("vllm_importance_sampling_correction")
    mode = launch.text("vllm_importance_sampling_mode", "rollout_importance_sampling_mode")
    if not (is_on and launch.is_true("use_vllm")) or mode is None:
        if launch.is_true("async_generate"):
            remark = "tiercel corrects completions of an older policy"
            draft.set(f"{key}.level", "token", "async_generate", remark=remark)
            text = f"{launch.framework} learns from older completions without a correction; tiercel corrects them"
            draft.note(text, "async_generate")
        return
    level, _, form = mode.partition("_")
    cap, floor = next(filter(None, map(launch.real, _CAPS)), None), launch.real(floor_name) or 0.0
    if draft.values.get("rollout.top_k") or draft.values.get("rollout.top_p", 1) < 1:
        text = "top_p and top_k cut the engine's probabilities, so no correction is taken"
        draft.note(text, *_CORRECTING, subject=key)
        return
    for part, value in (("level", level), ("mode", form or "truncate"), ("cap", cap)):
        if value:
            draft.put(f"{key}.{part}", value, *_CORRECTING)
    if floor:
        draft.set(f"{key}.floor", floor, floor_name)
    elif form == "mask":
        draft.set(f"{key}.floor", floor, *_CORRECTING, remark=f"{launch.framework} sets none")


def _loss(launch: Launch, draft: RecipeDraft) -> None:
    """Set the loss. The level of the ratio is part of the name of a clipped loss in tiercel, and a key for other
    losses."""
    level, loss = launch.text("importance_sampling_level") or "token", launch.text("loss_type") or "grpo"
    labels, of_sequences = ("importance_sampling_level", "loss_type"), ("luspo", "vespo")
    if level == "sequence" and draft.values.get("algorithm.top_entropy", 1) < 1:
        level = "sequence_token"
        if loss not in of_sequences:
            draft.note("tokens are chosen by entropy, so each has a ratio of its own: gspo_token", labels[0])
    if loss in of_sequences:
        _of_sequences(draft, loss, level, labels)
        return
    by_level = {"sequence": "gspo", "sequence_token": "gspo_token"}.get(level)
    if by_level is None or loss not in LOSSES or LOSSES[loss].surrogate != LOSSES[by_level].surrogate:
        draft.set("algorithm.loss", loss, *labels, remark=launch.default_remark("loss_type"))
        if by_level is not None:
            draft.set("algorithm.ratio", LOSSES[by_level].ratio, labels[0])
        return
    draft.set("algorithm.loss", by_level, *labels)
    means = {"bnpo": "token", "dapo": "token", "dr_grpo": "constant"}
    if loss in means:
        draft.put("algorithm.normalise", means[loss], "loss_type")


def _of_sequences(draft: RecipeDraft, loss: str, level: str, labels: tuple[str, str]) -> None:
    """Set a loss whose own ratio is that of a completion; the peer's level only replaces that of luspo."""
    draft.set("algorithm.loss", loss, *labels)
    ratios = {"token": "token", "sequence_token": "sequence_at_token"}
    if loss == "luspo" and level in ratios:
        draft.set("algorithm.ratio", ratios[level], *labels, remark="luspo's own is sequence")
    if loss == "vespo" and "algorithm.correction.level" in draft.values:
        text = f"{draft.launch.framework} puts the correction into its ratio; tiercel puts it into the loss"
        draft.note(text, subject="algorithm.loss: vespo")


def _clips(launch: Launch, draft: RecipeDraft) -> None:
    loss = launch.text("loss_type")
    if loss in ("sapo", "vespo"):
        return
    low, high = launch.real("epsilon"), launch.real("epsilon_high")
    if loss == "cispo":
        remark = f"{launch.framework}'s cispo has no lower bound"
        draft.set("algorithm.clip_low", None, "epsilon", remark=remark)
        _largest_weight(draft, low if high is None else high)
        return
    for key, value, flag in (("low", low, "epsilon"), ("high", low, "epsilon"), ("high", high, "epsilon_high")):
        if value is not None:
            draft.set(f"algorithm.clip_{key}", value, flag)


def _largest_weight(draft: RecipeDraft, bound: float | None) -> None:
    """Set cispo's largest weight, which the peers give directly and tiercel gives as its distance from 1."""
    if not bound:
        return
    framework, labels = draft.launch.framework, ("epsilon", "epsilon_high")
    remark = f"{framework} gives the largest weight itself"
    draft.set("algorithm.clip_high", max(round(bound - 1, 12), _LEAST_DISTANCE), *labels, remark=remark)
    if bound < 1:
        text = f"the largest weight is {bound:g} in {framework}, 1 in tiercel, the least of algorithm.clip_high"
        cause = "AdamW does not see a common factor of the loss, but optim.max_grad_norm does"
        draft.note(f"{text}: {cause}", *labels, subject=f"cispo's bound {bound:g}")


def _advantage(launch: Launch, draft: RecipeDraft) -> None:
    estimator, scale = launch.text("advantage_estimator"), launch.text("scale_rewards")
    labels = ("advantage_estimator", "scale_rewards", "multi_objective_aggregation")
    advantage = words_of("advantage_estimator").get(estimator or "grpo", estimator)
    if scale == "gdpo" or launch.text("multi_objective_aggregation") == "normalize_then_sum":
        advantage = "gdpo"
    if advantage != "group_norm" or "advantage_estimator" in launch.flags:
        draft.set("algorithm.advantage", advantage, *labels)
    if scale is None or "scale_rewards" not in launch.flags:
        return
    if advantage not in ("reinforce_pp_baseline", "gdpo"):
        word = {"true": "group", "false": "none"}.get(scale.lower(), scale)
        draft.set("algorithm.scale", word, "scale_rewards")
    elif scale not in ("gdpo", "batch"):
        draft.note(f"tiercel's {advantage} has its own scale, that of the step", "scale_rewards")


def _reference(launch: Launch, draft: RecipeDraft) -> None:
    """Set the reference. Its steps and its mix only count if --sync_ref_model is on."""
    if launch.is_true("sync_ref_model"):
        every = max(1, round((launch.number("ref_model_sync_steps") or 512) / draft.peer_updates_per_step))
        draft.set("algorithm.kl.sync_every", every, "ref_model_sync_steps", "sync_ref_model")
        draft.set("algorithm.kl.sync_mix", launch.real("ref_model_mixup_alpha"), "ref_model_mixup_alpha")


def _penalty(launch: Launch, draft: RecipeDraft) -> None:
    """Set the place of the KL penalty. In the reward it is a sum of log-ratios."""
    by_estimator = launch.text("advantage_estimator") in ("rloo", "reinforce_plus_plus")
    is_in_reward = launch.is_true("kl_in_reward") if launch.text("kl_in_reward") else by_estimator
    if not draft.values.get("algorithm.kl.coef", 0):
        return
    if is_in_reward or launch.method == "rloo":
        remark = "" if "kl_in_reward" in launch.flags else f"{launch.framework}'s default with this estimator"
        draft.set("algorithm.kl.place", "reward", "kl_in_reward", "advantage_estimator", remark=remark)
        draft.set("algorithm.kl.estimator", "k1", "kl_in_reward", remark="the log-ratio itself")
    else:
        draft.set("algorithm.kl.place", "loss", "kl_in_reward")
        if launch.is_true("use_bias_correction_kl"):
            _weighted_penalty(launch, draft)


def _weighted_penalty(launch: Launch, draft: RecipeDraft) -> None:
    """Set a penalty in the loss that TRL multiplies by the ratio; tiercel multiplies it by the token's ratio."""
    name = "use_bias_correction_kl"
    if (launch.text("importance_sampling_level") or "token") == "token":
        draft.put("algorithm.kl.by_ratio", True, name)
    else:
        text = "TRL weights the KL estimate by the completion's ratio; tiercel weights it by no ratio"
        draft.note(text, name, otherwise="the KL estimate")


def _switches(launch: Launch, draft: RecipeDraft) -> None:
    if launch.framework == "TRL" and draft.values.get("algorithm.entropy_coef"):
        remark = "TRL takes the mean over tokens, whatever the loss is"
        draft.set("algorithm.entropy_mean", "token", "entropy_coef", remark=remark)
    if launch.framework == "TRL" and draft.values.get("algorithm.top_entropy", 1) < 1:
        remark = "TRL takes this share of all tokens"
        draft.set("algorithm.top_entropy_of", "all", "top_entropy_quantile", remark=remark)
    if launch.is_true("dynamic_sample"):
        tries = launch.number("max_resample_times") or 3
        draft.set("rollout.resample_tries", tries, "max_resample_times", "dynamic_sample")
    else:
        draft.set("rollout.resample_tries", 0, "dynamic_sample")
    if not launch.is_true("async_generate"):
        draft.set("rollout.lookahead", 0, "async_generate")


def _drawing(launch: Launch, draft: RecipeDraft) -> None:
    if launch.framework == "VLM-R1":
        draft.set("rollout.top_k", 50, "top_k", remark="transformers' default, with which VLM-R1 samples")
    most = launch.number("max_new_tokens")
    if most is not None and "max_completion_length" not in launch.flags:
        draft.put("rollout.max_new_tokens", most, "max_new_tokens")


def _rloo(launch: Launch, draft: RecipeDraft) -> None:
    """Set what TRL's RLOO trainer does: leave-one-out advantages, and a single ratio for a completion's whole
    probability."""
    is_normalised = launch.is_true("normalize_advantages")
    advantage = "reinforce_pp_baseline" if is_normalised else "rloo"
    draft.set("algorithm.advantage", advantage, "normalize_advantages", remark="as TRL's RLOO trainer does")
    for name, value in (("loss", "grpo"), ("ratio", "product"), ("normalise", "sequence")):
        draft.set(f"algorithm.{name}", value, remark="as TRL's RLOO trainer does")
