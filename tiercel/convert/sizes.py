"""Convert sizes and lengths: per-device batches become prompts of a step, and numbers of updates become numbers of
steps."""

import math

from tiercel.config.keys import keys_of
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.values import mapping_in, split_count
from tiercel.message_text import counted

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_LARGEST_PACK = 16384  # the recipe's own default of learner.max_tokens_per_microbatch


def set_sizes(launch: Launch, draft: RecipeDraft) -> None:
    """Set the number of prompts in a step. The peers count completions; how much one device computes at once is not
    part of a recipe."""
    each = launch.number("per_device_train_batch_size") or 1
    processes = launch.processes
    accumulated = launch.number("gradient_accumulation_steps") or _usual_passes(launch, each)
    shared = _ranks_of_a_row(launch)
    update = each * max(1, processes // shared) * accumulated
    ranks = counted(processes, "process", "processes") + (f" / {shared} a row" if shared > 1 else "")
    origin = f"{each} per device x {ranks} x {accumulated} accumulated"
    labels = (*_BATCH, *launch.process_labels)
    if launch.kind != "grpo":
        draft.set("optim.prompts_per_step", update, *labels, remark=origin)
        draft.set("rollout.group_size", 1, remark=f"{launch.framework} has one answer for a prompt")
        return
    group = launch.number("num_generations") or 8
    if launch.framework == "VLM-R1" and launch.script == "grpo.py" and not launch.is_true("use_vllm"):
        draft.put("rollout.group_size", group, "num_generations")
        draft.set("optim.prompts_per_step", update, *labels, remark=f"prompts; {origin}")
        text = "grpo.py of R1-V and its kin counts prompts, and samples num_generations completions for each"
        draft.note(text, *_BATCH, otherwise="optim.prompts_per_step", is_change=False)
        draft.peer_updates = 1.0
        return
    rollout = launch.number("generation_batch_size")
    if rollout is None:
        rollout = each * processes * (launch.number("steps_per_generation") or accumulated)
    labels = (*labels, "generation_batch_size", "steps_per_generation")
    draft.put("rollout.group_size", group, "num_generations")
    size = max(rollout, update)
    prompts = max(1, size // group)
    sampled = counted(size, "completion")
    draft.set("optim.prompts_per_step", prompts, *labels, remark=f"{sampled} a rollout / {group} a group; {origin}")
    if size % group:
        text = f"{sampled} cannot be divided into groups of {group}; a step of tiercel has {counted(prompts, 'prompt')}"
        draft.note(text, *labels)
    draft.peer_updates = max(1.0, rollout / update)
    if launch.method == "grpo" and rollout > update:
        minibatches = math.gcd(max(1, rollout // update), prompts)
        draft.set("optim.minibatches", minibatches, *labels, remark=f"{sampled} / {update} an update")
        if minibatches * update != rollout:
            text = f"an update of {counted(update, 'completion')} holds part of a group; tiercel's holds whole groups"
            draft.note(text, *labels)
    elif rollout > update:
        text = f"{launch.framework} has another ratio for several updates of a rollout; tiercel takes one update"
        draft.note(text, *labels)


def _usual_passes(launch: Launch, each: int) -> int:
    """Return the passes of an update if none are given. ms-swift makes 16 rows of all processes, except in GRPO."""
    fills = launch.framework == "ms-swift" and launch.kind != "grpo"
    return max(1, math.ceil(16 / (each * launch.processes))) if fills else 1


def _ranks_of_a_row(launch: Launch) -> int:
    """Return how many ranks share a row. ms-swift's GRPO makes up for it by more passes, its other methods do not."""
    if launch.framework != "ms-swift" or launch.kind == "grpo":
        return 1
    return launch.number("sequence_parallel_size") or 1


def set_lengths(launch: Launch, draft: RecipeDraft) -> None:
    """Set the length of the run, the warm-up, and the intervals in steps; rows and sizes are set before."""
    updates = draft.peer_updates_per_step
    steps = launch.real("max_steps") or -1
    if steps > 0:
        draft.set("train.steps", _steps(steps, updates), "max_steps", "num_train_epochs", remark=_per(launch, updates))
    else:
        epochs = launch.real("num_train_epochs") or 1.0
        draft.put("train.epochs", int(epochs) if epochs == int(epochs) else epochs, "num_train_epochs")
    set_warmup(launch, draft, updates)
    set_least_rate(launch, draft, updates)
    remark = launch.default_remark("logging_steps")
    _set_interval(draft, "train.log_every", launch.real("logging_steps"), "logging_steps", remark=remark)
    if (launch.text("save_strategy") or "steps").lower() == "steps":
        remark, labels = launch.default_remark("save_steps") or _per(launch, updates), ("save_steps", "save_strategy")
        _set_interval(draft, "train.save_every", launch.real("save_steps"), *labels, remark=remark)
    else:
        draft.note("train.save_every is a number of steps, and the last step is always saved", "save_strategy")
    _evaluations(launch, draft)
    if "train.keep" not in draft.values:
        text = f"{launch.framework} keeps all checkpoints, tiercel the newest 3: train.keep"
        draft.note(text, subject="no --save_total_limit")


def _steps(updates: float, per_step: float) -> int:
    return max(1, round(updates / per_step))


def _per(launch: Launch, updates: float) -> str:
    return f"a step of tiercel is {updates:g} updates of {launch.framework}" if updates > 1 else ""


def _set_interval(draft: RecipeDraft, key: str, every: float | None, *labels: str, remark: str = "") -> None:
    """Set an interval in steps, from a number of updates or, below 1, from a share of the run; 0 sets none."""
    steps = _run_steps(draft)
    if not every:
        return
    if every >= 1:
        draft.set(key, _steps(every, draft.peer_updates_per_step), *labels, remark=remark)
    elif steps is not None:
        draft.set(key, max(1, math.ceil(every * steps)), *labels, remark=f"{every:g} of {steps} steps")
    else:
        text = f"{every:g} is a share of the run in {draft.launch.framework}"
        draft.note(f"{text}; write {key}: this share of the run's steps", *labels)


def _evaluations(launch: Launch, draft: RecipeDraft) -> None:
    """Set when held-out rows are evaluated, if there are any."""
    labels = ("eval_strategy", "evaluation_strategy", "eval_steps")
    asked = (launch.text("eval_strategy", "evaluation_strategy") or "").lower()
    if "data.eval" not in draft.values:
        text = "no rows are held out, so there is nothing to evaluate; data.eval names some"
        draft.note(text, *labels, is_change=asked not in ("", "no") and "eval_steps" not in launch.flags)
    elif asked == "epoch":
        draft.note("train.eval_every is a number of steps", *labels)
    elif asked != "no" and (launch.framework == "ms-swift" or asked == "steps"):
        usual = "save_steps" if launch.framework == "ms-swift" else "logging_steps"  # which transformers takes
        every = launch.real("eval_steps") or launch.real(usual) or 500
        remark = "" if "eval_steps" in launch.flags else f"as --{usual}"
        _set_interval(draft, "train.eval_every", every, *labels, remark=remark)
    else:
        draft.note("tiercel evaluates held-out rows at the start and the end", *labels)


def set_warmup(
    launch: Launch,
    draft: RecipeDraft,
    updates: float,
    steps_flag: str = "warmup_steps",
    share_flag: str = "warmup_ratio",
) -> None:
    """Set the steps in which the rate rises, from a number of updates or a share of the run."""
    flags, steps = (share_flag, steps_flag), _run_steps(draft)
    given = launch.real(steps_flag) or 0.0
    ratio = given if 0 < given < 1 else launch.real(share_flag) or 0.0
    if given >= 1:
        draft.set("optim.warmup_steps", _steps(given, updates), *flags, remark=_per(launch, updates))
    elif ratio > 0 and steps is not None:
        draft.set("optim.warmup_steps", math.ceil(ratio * steps), *flags, remark=f"of {steps} steps")
    elif ratio > 0:
        share = "tiercel check prints the share of an epoch that a step takes"
        draft.note(f"write optim.warmup_steps: this share of the run's steps; {share}", *flags)


_RATES = ("min_lr", "min_lr_rate", "min_lr_ratio", "num_decay_steps")  # in transformers' arguments of a schedule


def set_least_rate(launch: Launch, draft: RecipeDraft, updates: float, share_flag: str = "") -> None:
    """Set the rate that a schedule falls to, from a number or a share of the peak, and over how many steps `wsd`
    falls."""
    flag, schedule = share_flag or "lr_scheduler_kwargs", draft.values.get("optim.schedule", "constant")
    given = mapping_in(" ".join(launch.words(flag))) or {} if not share_flag else {"min_lr_rate": launch.real(flag)}
    if schedule == "constant":
        return
    numbers = {name: value for name, value in given.items() if name in _RATES and isinstance(value, int | float)}
    peak = float(draft.values.get("optim.lr", keys_of(launch.kind)["optim.lr"].field.default))
    share = numbers.get("min_lr_rate", numbers.get("min_lr_ratio", 0.0))
    if least := numbers.get("min_lr", float(f"{share * peak:.6g}")):
        draft.set("optim.min_lr", least, flag, remark="" if "min_lr" in numbers else f"{share:g} of the peak")
    if schedule == "wsd" and "num_decay_steps" in numbers:
        draft.set("optim.decay_steps", _steps(numbers["num_decay_steps"], updates), flag, remark=_per(launch, updates))
    if others := [str(name) for name in given if name not in _RATES]:
        draft.note(f"{', '.join(others)}: no schedule of tiercel takes it", flag)
    if launch.text("lr_scheduler_type") == "warmup_stable_decay":
        text = "tiercel's falls linearly at the end; transformers' by a cosine unless its decay_type is another"
        draft.note(text, "lr_scheduler_type")


def _run_steps(draft: RecipeDraft) -> int | None:
    """Return the number of steps in the run; None if neither its length in steps nor its number of rows (`path#N`) is
    given."""
    if "train.steps" in draft.values:
        return int(draft.values["train.steps"])
    sources = [draft.values.get("data.train", ""), *(entry["path"] for entry in draft.values.get("data.mix", []))]
    counts = [count for _, count in map(split_count, map(str, sources)) if count is not None]
    if len(counts) < len(sources):
        return None
    held_out = draft.values.get("data.eval")
    share = 1 - held_out["fraction"] if isinstance(held_out, dict) and "fraction" in held_out else 1.0
    rows = sum(counts) * share * float(draft.values["train.epochs"])
    return max(1, math.ceil(rows / int(draft.values.get("optim.prompts_per_step", 16))))


def set_pack(launch: Launch, draft: RecipeDraft) -> None:
    """Set the size of a microbatch, which must hold the longest prompt with its completion, or two answers."""
    known, rows = keys_of(launch.kind), 1 if launch.kind in ("sft", "grpo", "distill") else 2
    least = rows * draft.values.get("data.max_prompt_tokens", 4096)
    if "rollout.max_new_tokens" in known:
        least += draft.values.get("rollout.max_new_tokens", known["rollout.max_new_tokens"].field.default)
    if least > _LARGEST_PACK:
        draft.set("learner.max_tokens_per_microbatch", least, remark="the longest row; no result depends on it")
