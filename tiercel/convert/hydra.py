"""Converting commands of EasyR1 and verl: sizes, the loss, adapters, the engine, rows and rewards.

Their tables name the flag that a key comes from, so these functions ask by the key.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import MACHINES, Launch
from tiercel.convert.preferences import needs_reference
from tiercel.convert.rows import end_to_end
from tiercel.convert.sizes import set_least_rate, set_warmup
from tiercel.convert.table import words_of
from tiercel.convert.tuning import set_trackers, tuner_of
from tiercel.convert.values import value_in
from tiercel.message_text import counted

_LEAST = 1e-6  # of clip_low, which must be above 0


def refusals_of_overrides(launch: Launch) -> list[str]:
    """Return a line for an advantage or a loss that this version does not have."""
    lines = []
    for key, nearest in (("algorithm.advantage", "group_norm"), ("algorithm.loss", "grpo")):
        name = launch.flag_of(key)
        if (value := launch.text(name)) is not None and value not in words_of(name):
            given = name if name in launch.flags else f"{name}, by default"
            lines.append(f"{given} {value} is not a method of this version; nearest: {key}: {nearest}")
    return lines


def set_hydra(launch: Launch, draft: RecipeDraft) -> None:
    """Set everything except rows and rewards."""
    for step in (_sizes, _length, _warmup, _loss, _clips, _penalty, _tuning, _engine, _resampling, _run):
        step(launch, draft)


def _sizes(launch: Launch, draft: RecipeDraft) -> None:
    """Set the updates of a step. EasyR1 and verl count both in prompts, as tiercel does."""
    name = launch.flag_of("update_size")
    prompts, update = launch.number(launch.flag_of("optim.prompts_per_step")) or 1, launch.number(name) or 1
    minibatches = math.gcd(max(1, round(prompts / update)), prompts)
    if minibatches > 1:
        draft.put("optim.minibatches", minibatches, name, remark=f"{prompts} / {update} prompts an update")
    if minibatches * update != prompts:
        text = f"{update} prompts an update do not divide {prompts}; tiercel makes {counted(minibatches, 'update')}"
        draft.note(text, name, subject="optim.minibatches")


def _length(launch: Launch, draft: RecipeDraft) -> None:
    """Set the intervals, which EasyR1 and verl count in rollouts; a step of tiercel is one rollout."""
    if "train.steps" in draft.values:
        draft.note("the number of steps is given", *draft.drop("train.epochs"), is_change=False)
    for key, text in (
        ("train.save_every", "saves nothing; tiercel saves every 50 steps and the last: train.save_every"),
        ("train.eval_every", "evaluates nothing; tiercel evaluates at the start and the end: train.eval_every"),
        ("train.keep", f"{launch.framework} keeps all checkpoints, tiercel the newest 3: train.keep"),
    ):
        name = launch.flag_of(key)
        if (number := int(launch.real(name) or -1)) > 0:
            draft.set(key, number, name)
        else:
            draft.note(text, name, otherwise=name, is_change=key == "train.keep")


def _warmup(launch: Launch, draft: RecipeDraft) -> None:
    set_warmup(launch, draft, 1, *map(launch.flag_of, ("optim.warmup_steps", "warmup_share")))
    set_least_rate(launch, draft, 1, launch.flag_of("least_rate_share"))
    strategy = "worker.actor.optim.strategy"
    if launch.framework == "EasyR1" and launch.text(strategy) != "adamw":
        draft.note("EasyR1's moments are in bfloat16, tiercel's in float32: the section optim", strategy)


def _loss(launch: Launch, draft: RecipeDraft) -> None:
    """Note what the loss and the advantage take from other keys."""
    loss, mean = draft.values.get("algorithm.loss"), launch.flag_of("algorithm.normalise")
    if launch.framework == "verl" and loss in ("gspo", "sapo"):
        labels = draft.drop("algorithm.normalise")
        draft.note(f"{loss} of verl takes seq-mean-token-mean, whatever is given", *labels, is_change=False)
    if draft.values.get("algorithm.normalise") == "constant":
        text = "AdamW does not see the constant that the sum is divided by, optim.max_grad_norm does"
        draft.note(text, mean)
    advantage = draft.values.get("algorithm.advantage", "group_norm")
    if advantage != "group_norm":
        draft.drop("algorithm.scale")
    if advantage.startswith("reinforce_pp"):
        text = f"{launch.framework} takes mean and deviation of all tokens, so that long completions weigh more"
        draft.note(f"{text}; tiercel of completions", launch.flag_of("algorithm.advantage"))


def _clips(launch: Launch, draft: RecipeDraft) -> None:
    """Set bounds of the ratio. verl's clip_ratio counts if one of its two others is null."""
    loss = draft.values.get("algorithm.loss", "grpo")
    if loss == "sapo":
        return
    low, high, dual = (launch.flag_of(f"algorithm.{name}") for name in ("clip_low", "clip_high", "delta"))
    lowest, highest = launch.real(low) or 0.0, max(launch.real(high) or 0.0, _LEAST)
    draft.put("algorithm.clip_low", None if lowest >= 1 else max(lowest, _LEAST), low)
    draft.put("algorithm.clip_high", highest, high)
    draft.note("verl reads clip_ratio_low and clip_ratio_high instead", "actor_rollout_ref.actor.clip_ratio")
    if loss == "grpo" or (loss.startswith("gspo") and launch.framework == "EasyR1"):
        if (largest := launch.real(dual) or 0.0) > 1 + highest:
            draft.put("algorithm.delta", largest, dual)
        else:
            text = f"must be above 1 + algorithm.clip_high, {1 + highest:g}; it is off"
            draft.note(text, dual, subject=dual)


def _penalty(launch: Launch, draft: RecipeDraft) -> None:
    """Set the KL penalty: its weight, its place, and its estimator."""
    is_verl = launch.framework == "verl"
    switch, coef, kind = (launch.flag_of(f"kl_{name}") for name in ("in_loss", "coef", "estimator"))
    is_in_loss = launch.is_true(switch)
    is_on = is_in_loss if is_verl else not launch.is_true("algorithm.disable_kl")
    if is_verl and launch.is_true("algorithm.use_kl_in_reward"):
        in_reward = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        if is_in_loss:
            text = "the penalty is in the loss, and not in the reward too"
            draft.note(text, *in_reward[:2])
        else:
            is_on, (switch, coef, kind) = True, in_reward
    if not is_on or not (weight := launch.real(coef)):
        return
    draft.put("algorithm.kl.coef", weight, coef, switch)
    if not is_in_loss:
        draft.set("algorithm.kl.place", "reward", switch, remark=f"{launch.framework} puts the penalty into the reward")
    asked = launch.text(kind) or "kl"
    estimator = words_of(kind).get(asked)
    if estimator is None or (is_in_loss and estimator == "k1"):
        place, estimator = ("loss", "k2") if is_in_loss else ("reward", "k1")
        merit = "has the gradient of" if is_in_loss else "averages to"
        text = f"tiercel's {place} has no estimator {asked}; {estimator} {merit} the divergence"
        draft.note(text, kind, subject=kind)
    draft.put("algorithm.kl.estimator", estimator, kind)


def _tuning(launch: Launch, draft: RecipeDraft) -> None:
    """Set adapters, frozen parts, and where the reference is kept."""
    if launch.processes > 1:
        draft.set("train.strategy", "fsdp2", remark="shards the model as FSDP does")
    if tuner_of(launch) == "lora":
        _targets(launch, draft)
        return
    tower, offload = launch.flag_of("freeze"), launch.flag_of("model.reference")
    draft.put("freeze", ["vision", "projector"] if launch.is_true(tower) else [], tower)
    if needs_reference(draft):
        draft.put("model.reference", "cpu" if launch.is_true(offload) else "device", offload)


def _targets(launch: Launch, draft: RecipeDraft) -> None:
    targets = launch.flag_of("lora.targets")
    excluded = launch.flag_of("excluded_layers")
    words = [part.strip("'\" ") for word in launch.words(targets) for part in word.split(",")]
    left_out = launch.text(excluded) or ""
    is_language = "visual" in left_out or "vision" in left_out
    pattern = rf"(.*\.)?({'|'.join(words)})"
    if {"all-linear", "all"} & set(words):
        pattern = "language" if is_language else "all"
    elif left_out:
        pattern = rf"(?!{left_out})({pattern})"
    draft.put("lora.targets", pattern, targets, excluded)
    if left_out and not is_language:
        draft.note("layers by names: write lora.targets as a regular expression without them", excluded)


def _engine(launch: Launch, draft: RecipeDraft) -> None:
    name, top_k = launch.flag_of("rollout.engine"), launch.flag_of("rollout.top_k")
    engine = launch.text(name) or "vllm"
    draft.set("rollout.top_k", max(0, int(launch.real(top_k) or 0)), top_k)
    if engine == "hf":
        draft.set("rollout.engine", "local", name)
        return
    draft.put("rollout.engine", "vllm", name)
    if engine != "vllm":
        draft.note(f"tiercel samples by vllm instead of {engine}: docs/vllm.md", name, subject=f"{name}={engine}")
    size, free = launch.flag_of("rollout.vllm.tensor_parallel"), "actor_rollout_ref.rollout.free_cache_engine"
    draft.put("rollout.vllm.tensor_parallel", math.gcd(launch.number(size) or 1, launch.processes), size)
    if launch.framework == "EasyR1" or launch.is_true(free):
        level, remark = 2 if tuner_of(launch) == "lora" else 1, "the engine's memory is freed while it learns"
        draft.set("rollout.vllm.sleep_level", level, free, remark=remark)


def _resampling(launch: Launch, draft: RecipeDraft) -> None:
    """Set how often a group that teaches nothing is sampled again."""
    switch, tries = map(launch.flag_of, ("resampling", "rollout.resample_tries"))
    if not launch.is_true(switch):
        return
    most = int(launch.real(tries) or -1)
    draft.put("rollout.resample_tries", most if most > 0 else 20, tries, switch)
    others = ("algorithm.filter_groups.metric", "algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")
    text = "tiercel samples a group again if all its rewards are equal"
    draft.note(f"{launch.framework} looks at one reward's mean; {text}", switch, *others)


def _run(launch: Launch, draft: RecipeDraft) -> None:
    """Set where the run is kept, its trackers, and tell what it goes on from."""
    if "output" not in draft.values:
        names = ("trainer.project_name", "trainer.experiment_name")
        place = "/".join(("checkpoints", *(launch.text(name) or "" for name in names)))
        draft.set("output", place, *names, remark=f"as {launch.framework} names it")
    set_trackers(launch, draft, "trainer.logger")
    if launch.text(resumed := launch.flag_of("resumed")):
        text = "no checkpoint of tiercel; for its weights write lora.init or model.path, and the run begins at step 0"
        draft.note(text, resumed)
    if not {*MACHINES} & {*launch.flags}:
        text = f"{launch.processes} processes by default: tiercel grpo RECIPE --nproc {launch.processes}"
        draft.note(text, subject=MACHINES[0], is_change=False)


_READ = {  # columns that are read by their own names
    "prompt": ("prompt",), "problem": ("problem", "question", "prompt"), "answer": ("answer", "solution"),
    "images": ("images", "image"), "videos": ("videos", "video"),
}  # fmt: skip
_CONTENT = re.compile(r"\{\{\s*content\s*(\|\s*trim\s*)?\}\}")


def set_hydra_rows(launch: Launch, draft: RecipeDraft) -> None:
    """Set training rows, held-out rows, and the template of a question."""
    end_to_end(draft, [*map(_source, launch.words("data.train_files"))], "data.train_files")
    held = [_source(word) for word in launch.words("data.val_files")]
    if held:
        draft.set("data.eval", held[0], "data.val_files")
    if held[1:]:
        draft.note("data.eval is one file; put the rows into one", "data.val_files")
    if "data.eval" not in draft.values:
        draft.drop("train.eval_every")
        draft.note("no rows are held out, so there is nothing to evaluate", "trainer.test_freq", "trainer.val_freq")
    _columns(launch, draft)
    _template(launch, draft)


def _columns(launch: Launch, draft: RecipeDraft) -> None:
    """Set the names of columns that no format reads. verl's question is a list of turns, EasyR1's a text."""
    named = {"data.prompt_key": "prompt" if launch.framework == "verl" else "problem", "data.answer_key": "answer",
             "data.image_key": "images", "data.video_key": "videos"}  # fmt: skip
    given = {flag: launch.text(flag) for flag in named}
    renamed = {flag: column for flag, column in given.items() if column not in (None, *_READ[named[flag]])}
    if renamed:
        draft.set("data.columns", {named[flag]: column for flag, column in renamed.items()}, *renamed)


def _source(word: str) -> str:
    """Write a data set of the hub as tiercel does; `@split` is EasyR1's. Files stay."""
    path, _, split = word.partition("@")
    if re.search(r"\.(json|jsonl|parquet|arrow)$", path) or path.startswith((".", "/", "~", "$")) or "/" not in path:
        return word
    return f"hf:{path}:{split or 'train'}" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else word


def _template(launch: Launch, draft: RecipeDraft) -> None:
    name = "data.format_prompt"
    if not (path := launch.text(name)):
        return
    text = launch.text_in(path)
    asked = _CONTENT.sub("{prompt}", text or "")
    if text is None:
        told = "the file is not on this machine; write its text into data.prompt, with {prompt} for the question"
        draft.note(told, name)
    elif re.search(r"\{\{|\{%", asked) or "{prompt}" not in asked:
        draft.note("is more than a text around the question; write data.prompt, with {prompt} in it", name)
    else:
        # Brackets of the text itself are doubled, since data.prompt reads {name} as a column.
        parts = [part.replace("{", "{{").replace("}", "}}") for part in asked.split("{prompt}")]
        draft.set("data.prompt", "{prompt}".join(parts), name, remark="its text")


_EASYR1_REWARD: tuple[str, ...] = ("worker.reward.reward_function", "worker.reward.score_function")
_EASYR1_ARGUMENTS = tuple(f"{key}_kwargs" for key in _EASYR1_REWARD)
_VERL_ARGUMENTS = ("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs")
_LATER_KEYS = {  # of verl's rewards since February 2026, with `reward.` before them
    "reward_model.model.path": "reward_model.model_path", "reward_model.reward_manager": "reward_manager.name",
    "reward_model.reward_kwargs": "reward_kwargs",
}  # fmt: skip


def _reward_key(launch: Launch, name: str, below: str = "") -> str:
    """Return the key of verl's rewards as the command writes it, by its name until 2026 or its later one."""
    later = f"reward.{_LATER_KEYS.get(name, name)}{below}"
    return later if later in launch.flags else f"{name}{below}"


def set_hydra_rewards(launch: Launch, draft: RecipeDraft) -> None:
    """Set the rewards: a function of the user's, a reward model, and a penalty on long completions."""
    entries = [_function(launch, draft)]
    names = ("enable", "model.path", "reward_manager")
    model, path, manager = (_reward_key(launch, f"reward_model.{name}") for name in names)
    if launch.is_true(model):
        entries = [{"name": "model", "model": {"path": launch.text(path) or ""}}]
        draft.note("a reward model scores; rewards by rules may be added", model)
    parts = (*(f".overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor")), ".max_resp_len")
    enable, length, factor, end = (_reward_key(launch, "reward_model.reward_kwargs", part) for part in parts)
    if launch.is_true(enable):
        longest = launch.number(end) or draft.values.get("rollout.max_new_tokens", 256)
        own = {"max_tokens": longest, "buffer": launch.number(length), "weight": launch.real(factor) or 1.0}
        entries.append({"name": "soft_overlong", **own})
    file, function = (_reward_key(launch, f"custom_reward_function.{name}") for name in ("path", "name"))
    labels = (*_EASYR1_REWARD, file, function, path, enable, length, factor, end)
    draft.set("rewards", entries, *labels, remark=" ")
    if launch.text(manager) not in (None, "naive", "dapo"):
        draft.note("docs/rewards.md says how rewards are called", manager)


def _arguments(draft: RecipeDraft, keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that the command gives below one of these keys, by name, and their flags. Secrets stay out."""
    tree: dict[str, Any] = {}
    flags = []
    for flag in draft.launch.flags:
        key = next((key for key in keys if flag.startswith(f"{key}.")), None)
        if key is None or draft.is_secret(f"--{flag}"):
            continue
        flags.append(flag)
        branch, (*sections, leaf) = tree, flag.removeprefix(f"{key}.").split(".")
        for name in sections:
            branch = branch.setdefault(name, {})
        values = [value_in(word) for word in draft.launch.words(flag)]
        branch[leaf] = values[0] if len(values) == 1 else values
    return tree, flags


def _function(launch: Launch, draft: RecipeDraft) -> dict[str, Any]:
    """Return the user's own reward, or the nearest built-in one."""
    is_verl = launch.framework == "verl"
    names = (_reward_key(launch, "custom_reward_function.path"),) if is_verl else _EASYR1_REWARD
    if path := launch.text(*names):
        own = launch.text(_reward_key(launch, "custom_reward_function.name")) or "compute_score"
        function = own if is_verl else "main"
        call = path if ":" in path and not is_verl else f"{path}:{function}"
        key = "score" if is_verl else "overall"
        text = f"tiercel calls it as {launch.framework} does; of a dict that it returns, only `{key}` is used"
        arguments, flags = _arguments(draft, _VERL_ARGUMENTS if is_verl else _EASYR1_ARGUMENTS)
        draft.note(text, *names, subject=call)
        if arguments:
            draft.note("are its `arguments`, read as YAML; write a list of one entry as [x]", *flags)
        return {"call": call} | ({"arguments": arguments} if arguments else {})
    text = "name the rewards: rewards: [{name: math}]"
    if is_verl:
        text = "verl chooses the reward by each row's data_source; this is math, which compares by its own rules"
        text += ": docs/rewards.md"
    draft.note(text, subject=f"no {names[0]}")
    return {"name": "math"}
