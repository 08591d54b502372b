"""Convert commands of EasyR1 and verl: sizes, the loss, adapters, the engine. hydra_rows.py converts the rows."""

import math
from collections.abc import Mapping

from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import MACHINES, Launch
from tiercel.convert.preferences import needs_reference
from tiercel.convert.tuning import tuner_of
from tiercel.wording import counted

_LEAST = 1e-6  # the smallest clip_low, which must be above 0
ACTOR = {"verl": "actor_rollout_ref.actor", "EasyR1": "worker.actor"}
ROLLOUT = {"verl": "actor_rollout_ref.rollout", "EasyR1": "worker.rollout"}
ADVANTAGES = {
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
LOSSES = {
    "default": "grpo", "vanilla": "grpo", "gspo": "gspo", "gspo_token": "gspo_token", "cispo": "cispo", "sapo": "sapo",
}  # fmt: skip
MEANS = {
    "token": "token", "token-mean": "token", "seq": "sequence", "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k1+": "k2", "k3+": "k2"}
_ALL = ("all-linear", "all")


def refusals_of_overrides(launch: Launch) -> list[str]:
    """Return a line for an advantage or a loss that this version does not have."""
    lines = []
    for name, known, nearest in (
        ("algorithm.adv_estimator", ADVANTAGES, "algorithm.advantage: group_norm"),
        (loss_flag(launch), LOSSES, "algorithm.loss: grpo"),
    ):
        if (value := launch.text(name)) is not None and value not in known:
            given = name if name in launch.flags else f"{name}, by default"
            lines.append(f"{given} {value} is not a method of this version; nearest: {nearest}")
    return lines


def loss_flag(launch: Launch) -> str:
    """Return the key that names the loss."""
    return "actor_rollout_ref.actor.policy_loss.loss_mode" if launch.framework == "verl" else "worker.actor.loss_type"


def set_hydra(draft: RecipeDraft) -> None:
    """Set everything except rows and rewards."""
    for step in (_sizes, _length, _rates, _loss, _clips, _advantage, _penalty, _tuning, _engine, _resampling, _run):
        step(draft)


def said(draft: RecipeDraft, *names: str) -> tuple[str, ...]:
    """Return the remark that a value is the peer's default, if the command gives none of the keys; otherwise
    nothing."""
    return tuple(filter(None, [draft.launch.default_remark(*names, of=names[0])]))


def put(draft: RecipeDraft, key: str, value: object, *names: str, remark: str = "") -> None:
    """Set a key from keys of the peer; if none of them is given, the remark says that the value is their default."""
    remarks = "; ".join(filter(None, (*said(draft, *names), remark)))
    draft.set(key, value, *(f"--{name}" for name in names), remark=remarks)


def _sizes(draft: RecipeDraft) -> None:
    """Set the number of prompts in a step and in an update; the peers count in prompts, too."""
    launch, actor = draft.launch, ACTOR[draft.launch.framework]
    is_verl = launch.framework == "verl"
    whole = "data.train_batch_size" if is_verl else "data.rollout_batch_size"
    part = f"{actor}.ppo_mini_batch_size" if is_verl else f"{actor}.global_batch_size"
    prompts, update = launch.number(whole) or 1, launch.number(part) or 1
    put(draft, "optim.prompts_per_step", prompts, whole)
    minibatches = math.gcd(max(1, round(prompts / update)), prompts)
    if minibatches > 1:
        put(draft, "optim.minibatches", minibatches, part, remark=f"{prompts} / {update} prompts an update")
    if minibatches * update != prompts:
        text = f"{update} prompts an update do not divide {prompts}; here {counted(minibatches, 'update')}"
        draft.note(text, f"--{part}", subject="optim.minibatches")
    put(
        draft,
        "rollout.group_size",
        launch.number(f"{ROLLOUT[launch.framework]}.n") or 1,
        f"{ROLLOUT[launch.framework]}.n",
    )


def _length(draft: RecipeDraft) -> None:
    """Set the length of the run and its intervals. The peers count them in rollouts, and a step is a rollout here."""
    launch = draft.launch
    steps = "trainer.total_training_steps" if launch.framework == "verl" else "trainer.max_steps"
    if (most := launch.number(steps)) is not None:
        draft.set("train.steps", most, f"--{steps}", "--trainer.total_epochs")
    else:
        epochs = launch.real("trainer.total_epochs") or 1
        put(draft, "train.epochs", int(epochs), "trainer.total_epochs")
    evaluation = "trainer.test_freq" if launch.framework == "verl" else "trainer.val_freq"
    for key, name in (("train.save_every", "trainer.save_freq"), ("train.eval_every", evaluation)):
        every = int(launch.real(name) or -1)
        if every > 0:
            draft.set(key, every, f"--{name}")
        else:
            text = "never there; here every 50 steps, and the last: train.save_every"
            told = text if key == "train.save_every" else "never there; here at the start and the end: train.eval_every"
            draft.note(told, f"--{name}", subject="" if name in launch.flags else name, is_change=False)
    keep = "trainer.max_actor_ckpt_to_keep" if launch.framework == "verl" else "trainer.save_limit"
    if (kept := launch.real(keep)) is not None and kept > 0:
        draft.set("train.keep", int(kept), f"--{keep}")
    else:
        draft.note("all checkpoints are kept there, here the newest 3: train.keep", f"--{keep}", subject=keep)


def _rates(draft: RecipeDraft) -> None:
    """Set the moments and the warm-up."""
    launch, optim = draft.launch, f"{ACTOR[draft.launch.framework]}.optim"
    betas = [float(word) for word in launch.words(f"{optim}.betas")]
    draft.set("optim.betas", betas, f"--{optim}.betas")
    ratio = f"{optim}.lr_warmup_steps_ratio" if launch.framework == "verl" else f"{optim}.lr_warmup_ratio"
    given, share = launch.real(f"{optim}.lr_warmup_steps") or 0, launch.real(ratio) or 0
    labels = (f"--{optim}.lr_warmup_steps", f"--{ratio}")
    if given > 0:
        draft.set("optim.warmup_steps", int(given), *labels)
    elif share > 0 and "train.steps" in draft.values:
        draft.set("optim.warmup_steps", math.ceil(share * draft.values["train.steps"]), *labels)
    elif share > 0:
        draft.note("write optim.warmup_steps: this share of the run's steps, which tiercel check prints", *labels)
    strategy = f"{optim}.strategy"
    if launch.framework == "EasyR1" and launch.text(strategy) != "adamw":
        draft.note("moments in bfloat16 there; here in float32: the section optim", f"--{strategy}")


def _loss(draft: RecipeDraft) -> None:
    launch, name = draft.launch, loss_flag(draft.launch)
    loss = LOSSES[launch.text(name) or "vanilla"]
    put(draft, "algorithm.loss", loss, name)
    mean = f"{ACTOR[launch.framework]}.{'loss_agg_mode' if launch.framework == 'verl' else 'loss_avg_mode'}"
    asked = launch.text(mean) or "token"
    if launch.framework == "verl" and loss in ("gspo", "sapo"):
        draft.note(f"{loss} takes seq-mean-token-mean there, whatever is given", f"--{mean}", is_change=False)
        return
    if asked not in MEANS:
        draft.note(f"has no equivalent; algorithm.normalise is one of {', '.join(set(MEANS.values()))}", f"--{mean}")
        return
    put(draft, "algorithm.normalise", MEANS[asked], mean)
    if MEANS[asked] == "constant":
        text = "AdamW does not see the constant that the sum is divided by, optim.max_grad_norm does"
        draft.note(text, f"--{mean}")


def _clips(draft: RecipeDraft) -> None:
    """Set the bounds of the ratio. verl's clip_ratio counts if one of the other two is null."""
    launch, actor = draft.launch, ACTOR[draft.launch.framework]
    loss = draft.values.get("algorithm.loss", "grpo")
    if loss == "sapo":
        names = ("tau_pos", "tau_neg") if launch.framework == "verl" else ("tau_positive", "tau_negative")
        for key, name in zip(("gate_positive", "gate_negative"), names, strict=True):
            put(draft, f"algorithm.{key}", launch.real(f"{actor}.{name}"), f"{actor}.{name}")
        return
    for key, name in (("clip_low", f"{actor}.clip_ratio_low"), ("clip_high", f"{actor}.clip_ratio_high")):
        value = launch.real(name) or 0.0
        if key == "clip_low":
            put(draft, "algorithm.clip_low", None if value >= 1 else max(value, _LEAST), name)
        else:
            put(draft, "algorithm.clip_high", max(value, _LEAST), name)
    if launch.framework == "verl":
        draft.note("clip_ratio_low and clip_ratio_high count there", f"--{actor}.clip_ratio")
    dual = f"{actor}.{'clip_ratio_c' if launch.framework == 'verl' else 'clip_ratio_dual'}"
    if loss == "grpo" or (loss.startswith("gspo") and launch.framework == "EasyR1"):
        largest, bound = launch.real(dual) or 0.0, 1 + float(draft.values.get("algorithm.clip_high") or 0.2)
        if largest > bound:
            put(draft, "algorithm.delta", largest, dual)
        else:
            draft.note(f"must be above 1 + algorithm.clip_high here, {bound:g}; it is off", f"--{dual}", subject=dual)


def _advantage(draft: RecipeDraft) -> None:
    launch, name = draft.launch, "algorithm.adv_estimator"
    advantage = ADVANTAGES[launch.text(name) or "grpo"]
    put(draft, "algorithm.advantage", advantage, name)
    if advantage == "group_norm" and launch.framework == "verl":
        scale = "algorithm.norm_adv_by_std_in_grpo"
        draft.carry("algorithm.scale", "group" if launch.is_true(scale) else "none", scale)
    if advantage.startswith("reinforce_pp"):
        text = "mean and deviation are of all tokens there, so that long completions weigh more; here of completions"
        draft.note(text, f"--{name}")


def _penalty(draft: RecipeDraft) -> None:
    """Set the KL penalty: its weight, its place, and its estimator."""
    launch = draft.launch
    if launch.framework == "verl":
        actor, place = ACTOR["verl"], "algorithm.use_kl_in_reward"
        in_loss = (f"{actor}.use_kl_loss", f"{actor}.kl_loss_coef", f"{actor}.kl_loss_type")
        in_reward = (place, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        is_in_loss, is_on = launch.is_true(in_loss[0]), launch.is_true(in_loss[0]) or launch.is_true(place)
        if is_in_loss and launch.is_true(place):
            draft.note("the penalty is in the loss here, and not in the reward too", f"--{place}", f"--{in_reward[1]}")
    else:
        in_loss = in_reward = ("algorithm.use_kl_loss", "algorithm.kl_coef", "algorithm.kl_penalty")
        is_in_loss, is_on = launch.is_true(in_loss[0]), not launch.is_true("algorithm.disable_kl")
    switch, coef, kind = in_loss if is_in_loss else in_reward
    weight = launch.real(coef) or 0.0
    if not is_on or not weight:
        return
    put(draft, "algorithm.kl.coef", weight, coef, switch)
    if not is_in_loss:
        draft.set("algorithm.kl.place", "reward", f"--{switch}", remark="the penalty is in the reward there")
    asked = launch.text(kind) or "kl"
    estimator = ESTIMATORS.get(asked) if is_in_loss or launch.framework == "verl" else "k1"  # EasyR1 always takes p - q
    if estimator is None or (is_in_loss and estimator == "k1"):
        estimator = "k2"
        draft.note(
            f"{asked} is no estimator in the loss here; k2 has the divergence's gradient", f"--{kind}", subject=kind
        )
    put(draft, "algorithm.kl.estimator", estimator, kind)


def _tuning(draft: RecipeDraft) -> None:
    """Set adapters, frozen parts, and where the reference is kept."""
    launch, is_verl = draft.launch, draft.launch.framework == "verl"
    model = "actor_rollout_ref.model" if is_verl else "worker.actor.model"
    rank, alpha, targets, excluded = (
        (f"{model}.lora_rank", f"{model}.lora_alpha", f"{model}.target_modules", f"{model}.exclude_modules")
        if is_verl
        else tuple(f"{model}.lora.{name}" for name in ("rank", "alpha", "target_modules", "exclude_modules"))
    )
    tower = f"{ACTOR['verl']}.freeze_vision_tower" if is_verl else f"{model}.freeze_vision_tower"
    if launch.processes > 1:
        draft.set("train.strategy", "fsdp2", remark="shards the model as FSDP does")
    if tuner_of(launch) == "full":
        put(draft, "freeze", ["vision", "projector"] if launch.is_true(tower) else [], tower)
        offload = (
            f"{'actor_rollout_ref.ref.fsdp_config.param_offload' if is_verl else 'worker.ref.fsdp.enable_cpu_offload'}"
        )
        if needs_reference(draft):
            place = "cpu" if launch.is_true(offload) else "device"
            put(draft, "model.reference", place, offload)
        return
    put(draft, "lora.rank", launch.number(rank), rank)
    put(draft, "lora.alpha", launch.real(alpha), alpha)
    _targets(draft, targets, excluded)
    if is_verl and (adapter := launch.text(f"{model}.lora_adapter_path")):
        draft.set("lora.init", adapter, f"--{model}.lora_adapter_path")


def _targets(draft: RecipeDraft, targets: str, excluded: str) -> None:
    launch = draft.launch
    words = [part.strip("'\" ") for word in launch.words(targets) for part in word.split(",")]
    left_out = launch.text(excluded) or ""
    is_language = "visual" in left_out or "vision" in left_out
    if set(words) & set(_ALL):
        put(draft, "lora.targets", "language" if is_language else "all", targets, excluded)
    else:
        pattern = rf"(.*\.)?({'|'.join(words)})"
        put(draft, "lora.targets", rf"(?!{left_out})({pattern})" if left_out else pattern, targets, excluded)
    if left_out and not is_language:
        draft.note("layers by names: write lora.targets as a regular expression without them", f"--{excluded}")


def _engine(draft: RecipeDraft) -> None:
    launch, rollout = draft.launch, ROLLOUT[draft.launch.framework]
    name = f"{rollout}.name"
    engine = launch.text(name) or "vllm"
    draft.set("rollout.top_k", max(0, int(launch.real(f"{rollout}.top_k") or 0)), f"--{rollout}.top_k")
    if engine == "hf":
        draft.set("rollout.engine", "local", f"--{name}")
        return
    put(draft, "rollout.engine", "vllm", name)
    if engine != "vllm":
        draft.note(f"{engine} there, vllm here: docs/vllm.md", f"--{name}", subject=f"{name}={engine}")
    size = f"{rollout}.{'tensor_model_parallel_size' if launch.framework == 'verl' else 'tensor_parallel_size'}"
    ranks = math.gcd(launch.number(size) or 1, launch.processes)
    put(draft, "rollout.vllm.tensor_parallel", ranks, size)
    put(draft, "rollout.vllm.gpu_memory_utilization", launch.real(f"{rollout}.gpu_memory_utilization"),
        f"{rollout}.gpu_memory_utilization")  # fmt: skip
    level = 2 if tuner_of(launch) == "lora" else 1
    free = f"{rollout}.free_cache_engine"
    if launch.framework == "EasyR1" or launch.is_true(free):
        draft.set("rollout.vllm.sleep_level", level, f"--{free}", remark="the engine's memory is freed while it learns")
    _correction(draft)


def _correction(draft: RecipeDraft) -> None:
    launch, name = draft.launch, "algorithm.rollout_correction.rollout_is"
    level = launch.text(name)
    if level in ("token", "sequence"):
        draft.set("algorithm.correction.level", level, f"--{name}")
        cap = f"{name}_threshold"
        put(draft, "algorithm.correction.cap", launch.real(cap), cap)


def _resampling(draft: RecipeDraft) -> None:
    """Set how often a group that teaches nothing is sampled again."""
    launch = draft.launch
    names: Mapping[str, tuple[str, ...]] = {
        "verl": ("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"),
        "EasyR1": ("algorithm.online_filtering", "trainer.max_try_make_batch"),
    }
    switch, tries = names[launch.framework]
    others = ("algorithm.filter_groups.metric", "algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")
    if not launch.is_true(switch):
        return
    most = int(launch.real(tries) or -1)
    put(draft, "rollout.resample_tries", most if most > 0 else 20, tries, switch)
    text = "looks at one reward's mean there; here a group is sampled again where all its rewards are equal"
    draft.note(text, f"--{switch}", *(f"--{name}" for name in others))


def _run(draft: RecipeDraft) -> None:
    """Set where the run is kept and its trackers, and add a note on what it continues from."""
    launch = draft.launch
    kept = "trainer.default_local_dir" if launch.framework == "verl" else "trainer.save_checkpoint_path"
    if folder := launch.text(kept):
        draft.set("output", folder, f"--{kept}", remark="the same command resumes there")
    else:
        names = ("trainer.project_name", "trainer.experiment_name")
        place = "/".join(("checkpoints", *(launch.text(name) or "" for name in names)))
        draft.set("output", place, *(f"--{name}" for name in names), remark="as there")
    known = ("tensorboard", "wandb", "trackio", "swanlab")
    loggers = launch.words("trainer.logger")
    if "trainer.logger" in launch.flags:
        draft.set("trackers", [word for word in loggers if word in known], "--trainer.logger")
        others = [word for word in loggers if word not in (*known, "console", "file")]
        if others:
            draft.note(f"trackers are {', '.join(known)}", "--trainer.logger", subject=f"logger {' '.join(others)}")
    else:
        draft.note("trackers: [wandb] writes the same", subject="trainer.logger is console and wandb by default")
    resumed = "trainer.resume_from_path" if launch.framework == "verl" else "trainer.load_checkpoint_path"
    if launch.text(resumed):
        text = "no checkpoint of tiercel; for its weights write lora.init or model.path, and the run begins at step 0"
        draft.note(text, f"--{resumed}")
    draft.note(
        "the same command resumes from the newest checkpoint in `output`", "--trainer.resume_mode", is_change=False
    )
    shown = [f"--{name}" for name in MACHINES]
    if not {*MACHINES} & {*launch.flags}:
        draft.note(f"{launch.processes} processes by default: tiercel grpo RECIPE --nproc {launch.processes}", *shown,
                   subject=MACHINES[0], is_change=False)  # fmt: skip
