"""Flags of other frameworks as keys of a recipe. A flag with a meaning of its own has a function here; the others go by
the table of synonyms that unknown keys of recipes go by too."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from tiercel.config.keys import ENTRY, allowed_words, keys_of
from tiercel.config.suggestions import nearest_key
from tiercel.config.synonyms import SYNONYMS, VALUE_SYNONYMS
from tiercel.config.yaml_text import YamlProblem, parse
from tiercel.importing.launches import Framework, Launch
from tiercel.reliability.redaction import is_secret_name

NO_EQUIVALENT = "has no equivalent"


@dataclass(slots=True)
class Draft:
    """A recipe in the making: values by key, what each came from, and what there is to say about flags."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def set(self, key: str, value: Any, origin: str) -> None:
        self.values[key] = value
        self.origins[key] = origin


def draft_of(launch: Launch) -> Draft:
    """The recipe that does what the command does. Raises ValueError where a number is none."""
    draft = Draft()
    _defaults(draft, launch)
    for name, values in launch.flags.items():
        if name not in JOINT_FLAGS and (special := SPECIAL.get(name)) is not None:
            special(draft, launch, values)
        elif name not in JOINT_FLAGS:
            _by_synonym(draft, name, values)
    for joint in JOINT:
        joint(draft, launch)
    return draft


def _by_synonym(draft: Draft, name: str, values: tuple[str, ...]) -> None:
    """A flag that is a key by another name."""
    flag, suggestion = f"--{name}", SYNONYMS.get(name) or nearest_key(name)
    if is_secret_name(name):
        draft.notes.append((flag, "a secret stays out of the recipe; export it as an environment variable"))
        return
    key = suggestion.key if name in SYNONYMS or (suggestion.key or "").rpartition(".")[2] == name else None
    if key is None or ENTRY in key.split(".") or key not in keys_of("grpo") or keys_of("grpo")[key].section:
        draft.notes.append((f"{flag} {' '.join(values)}", suggestion.hint if name in SYNONYMS else NO_EQUIVALENT))
        return
    value = _value(values)
    if isinstance(value, str):
        word = VALUE_SYNONYMS.get(key, {}).get(value.lower(), value)
        if word is None:
            draft.notes.append((f"{flag} {value}", "is not in this version"))
            return
        value = word
    draft.set(key, value, flag)
    if suggestion.hint:
        draft.notes.append((f"{flag} {' '.join(values)}", suggestion.hint))


def _value(values: tuple[str, ...]) -> Any:
    """Numbers and booleans as YAML reads them, so that 1e-5 is one; all else as text. Several are a list."""
    read = [_scalar(value) for value in values]
    return read[0] if len(read) == 1 else read


def _scalar(text: str) -> Any:
    try:
        value = parse(text)[0]
    except YamlProblem:
        return text
    return value if isinstance(value, bool | int | float) else text


DEFAULTS: dict[Framework, dict[str, Any]] = {
    "ms-swift": {
        "algorithm.kl.coef": 0.04,
        "rollout.max_new_tokens": 512,
        "optim.lr": 1e-4,
        "optim.schedule": "cosine",
    },
    "TRL": {
        "algorithm.loss": "dapo",
        "rollout.max_new_tokens": 256,
        "optim.lr": 1e-6,
        "optim.schedule": "linear",
    },
    "VLM-R1": {"algorithm.kl.coef": 0.04, "optim.lr": 1e-6, "optim.schedule": "linear"},
}


def _defaults(draft: Draft, launch: Launch) -> None:
    """Defaults of the framework that are not tiercel's."""
    of_grpo = ("algorithm", "rollout")
    for key, value in DEFAULTS[launch.framework].items():
        if launch.kind == "grpo" or key.partition(".")[0] not in of_grpo:
            draft.set(key, value, f"{launch.framework}'s default")
    if launch.framework == "ms-swift" and _is_full(launch):
        draft.set("optim.lr", 1e-5, "ms-swift's default in full fine-tuning")
    if launch.framework == "TRL" and launch.kind == "sft":
        draft.set("optim.lr", 2e-5, "TRL's default for SFT")


def _is_full(launch: Launch) -> bool:
    return launch.text("train_type", "tuner_type") == "full"


def _sizes(draft: Draft, launch: Launch) -> None:
    """Per-device batches become prompts of a step: they count completions there, and what one device computes at once
    is no matter of the recipe."""
    each = launch.number("per_device_train_batch_size", 1 if launch.framework == "ms-swift" else 8)
    processes = launch.processes
    accumulated = launch.number("gradient_accumulation_steps", 1)
    update = each * processes * accumulated
    origin = f"{each} per device x {processes} processes x {accumulated} accumulated"
    if launch.kind == "sft":
        draft.set("optim.prompts_per_step", update, origin)
        return
    group = launch.number("num_generations", 8)
    rollout = launch.number(
        "generation_batch_size", each * processes * launch.number("steps_per_generation", accumulated)
    )
    draft.set("rollout.group_size", group, "--num_generations")
    if rollout % group or rollout % update:
        draft.notes.append(
            (f"a rollout of {rollout} completions", f"is no multiple of {group} or of {update}; check it")
        )
    draft.set(
        "optim.prompts_per_step", max(1, rollout // group), f"{rollout} completions a rollout / {group}: {origin}"
    )
    if rollout > update:
        draft.set(
            "optim.minibatches", max(1, rollout // update), f"{rollout} completions a rollout / {update} an update"
        )


def _clips(draft: Draft, launch: Launch) -> None:
    low, high = launch.text("epsilon"), launch.text("epsilon_high")
    if launch.text("loss_type") == "cispo":
        if high is not None:
            draft.set("algorithm.clip_low", None, "cispo has no lower bound there")
            draft.set("algorithm.clip_high", round(float(high) - 1, 12), "--epsilon_high, the largest weight itself")
        return
    if low is not None:
        draft.set("algorithm.clip_low", float(low), "--epsilon")
        draft.set("algorithm.clip_high", float(low), "--epsilon")
    if high is not None:
        draft.set("algorithm.clip_high", float(high), "--epsilon_high")


def _loss(draft: Draft, launch: Launch) -> None:
    """The level of the ratio is part of the loss's name here."""
    level, loss = launch.text("importance_sampling_level"), launch.text("loss_type")
    by_level = {"sequence": "gspo", "sequence_token": "gspo_token"}.get(level or "token")
    if by_level is not None and (loss or "grpo") != "grpo":
        draft.notes.append((f"--loss_type {loss}", f"with --importance_sampling_level {level} is {by_level} here"))
    if by_level is not None or loss is not None:
        draft.set("algorithm.loss", by_level or loss, "--importance_sampling_level" if by_level else "--loss_type")


def _advantage(draft: Draft, launch: Launch) -> None:
    estimator, scale = launch.text("advantage_estimator"), launch.text("scale_rewards")
    takes_off = estimator in ("rloo", "reinforce_plus_plus") and launch.text("kl_in_reward") is None
    if takes_off and draft.values.get("algorithm.kl.coef"):
        draft.set("algorithm.kl.place", "reward", f"ms-swift's default with {estimator}")
    names = {"grpo": "group_norm", "reinforce_plus_plus": "reinforce_pp_baseline", "rloo": "rloo", "gdpo": "gdpo"}
    if estimator is not None:
        draft.set("algorithm.advantage", names.get(estimator, estimator), "--advantage_estimator")
    word = {"true": "group", "false": "none"}.get((scale or "").lower(), scale)
    if word == "gdpo":
        draft.set("algorithm.advantage", "gdpo", "--scale_rewards")
    elif word is not None and draft.values.get("algorithm.advantage") not in ("reinforce_pp_baseline", "gdpo"):
        draft.set("algorithm.scale", word, "--scale_rewards")


def _tuner(draft: Draft, launch: Launch) -> None:
    """LoRA, and which parts stay as they are."""
    asked = (launch.text("use_peft") or "false").lower() == "true"
    has_adapter = not _is_full(launch) if launch.framework == "ms-swift" else asked
    if not has_adapter:
        unread = [key for key in draft.values if key.startswith("lora.")]
        for key in unread:
            draft.notes.append((draft.origins.pop(key, key), "is not read in full fine-tuning"))
            del draft.values[key]
    else:
        defaults = {"ms-swift": (8, 32), "TRL": (16, 32), "VLM-R1": (64, 128)}[launch.framework]
        draft.values.setdefault("lora.rank", defaults[0])
        draft.values.setdefault("lora.alpha", defaults[1])
        draft.values.setdefault("lora.targets", "language")
    dropout = draft.values.get("lora.dropout", 0)
    if dropout and launch.kind == "grpo":
        draft.notes.append((f"--lora_dropout {dropout}", "completions share one prompt, so it must be 0 here"))
        draft.set("lora.dropout", 0.0, "--lora_dropout, see above")
    part_of = {"freeze_vit": "vision", "freeze_aligner": "projector", "freeze_llm": "language"}
    if any(name in launch.flags for name in part_of):
        frozen = [
            part for name, part in part_of.items() if (launch.text(name) or str(name != "freeze_llm")).lower() == "true"
        ]
        draft.set("freeze", frozen, "--freeze_vit, --freeze_aligner, --freeze_llm")
    if launch.text("freeze_vision_modules") == "true":
        draft.set("freeze", ["vision", "projector"], "--freeze_vision_modules")


def _length(draft: Draft, launch: Launch) -> None:
    """Both of steps and epochs are given where --max_steps overrides."""
    if not isinstance(draft.values.get("train.steps", 0), int):
        raise ValueError(f"--max_steps {draft.values['train.steps']} is no number")
    if draft.values.get("train.steps", 0) <= 0:
        draft.values.pop("train.steps", None)
    else:
        draft.values.pop("train.epochs", None)
    if not {"train.steps", "train.epochs"} & set(draft.values):
        draft.set("train.epochs", 1 if launch.framework == "ms-swift" else 3, f"{launch.framework}'s default")
    ratio = launch.text("warmup_ratio")
    steps = draft.values.get("train.steps")
    if ratio is not None and steps is not None:
        draft.set("optim.warmup_steps", round(float(ratio) * steps), f"--warmup_ratio {ratio} of {steps} steps")
    elif ratio is not None and float(ratio) > 0:
        draft.notes.append((f"--warmup_ratio {ratio}", "write optim.warmup_steps, a number of steps"))


REWARDS: dict[str, dict[str, Any] | None] = {
    "accuracy": {"name": "math"},
    "accuracy_reward": {"name": "math"},
    "math": {"name": "math"},
    "format": {"name": "format"},
    "format_reward": {"name": "format"},
    "think_format_reward": {"name": "format"},
    "repetition": {"name": "repetition"},
    "soft_overlong": {"name": "soft_overlong"},
    "cosine": {"name": "cosine"},
    "length": {"name": "length"},
}


LENGTHS = {
    "cosine": ("cosine_max_len", "max_completion_length"),
    "soft_overlong": ("soft_max_length", "max_completion_length"),
    "length": ("max_completion_length",),
}


def _rewards(draft: Draft, launch: Launch) -> None:
    names = launch.flags.get("reward_funcs", ())
    models = launch.flags.get("reward_model", ())
    weights = [float(weight) for weight in launch.flags.get("reward_weights", ())]
    entries: list[dict[str, Any]] = []
    for name in names:
        entry = dict(REWARDS.get(name) or {"call": f"mine.py:{name.rpartition('.')[2]}"})
        if launch.framework == "VLM-R1" and name == "accuracy":
            entry = {"name": "vlm_r1_rec"}
            draft.notes.append(("--reward_funcs accuracy", "taken for referring expressions; other rows, another name"))
        if flags := LENGTHS.get(entry.get("name", "")):
            entry["max_tokens"] = int(launch.text(*flags) or draft.values.get("rollout.max_new_tokens", 256))
        if entry.get("name") == "format":
            draft.notes.append((f"--reward_funcs {name}", "has a pattern of its own there; see rewards.N.pattern"))
        if entry.get("name") == "soft_overlong":
            entry["buffer"] = int(launch.text("soft_cache_length") or 50)
        if "call" in entry:
            draft.notes.append((f"--reward_funcs {name}", "is a function of yours: take a Sample, answer a number"))
        entries.append(entry)
    entries += [{"name": "model", "model": {"path": path}} for path in models]
    if weights:
        for number, entry in enumerate(entries):
            entry["weight"] = weights[number] if number < len(weights) else 1.0
    if entries:
        draft.set("rewards", entries, "--reward_funcs" if names else "--reward_model")
    elif launch.kind == "grpo":
        draft.notes.append(("no --reward_funcs", "name the rewards: rewards: [{name: exact}]"))


def _engine(draft: Draft, launch: Launch) -> None:
    if (launch.text("use_vllm") or "false").lower() != "true":
        return
    mode = launch.text("vllm_mode") or ("server" if launch.framework == "TRL" else "colocate")
    if mode == "server":
        address = launch.text("vllm_server_base_url")
        host, port = launch.text("vllm_server_host") or "127.0.0.1", launch.text("vllm_server_port") or "8000"
        draft.set("rollout.engine", "vllm-server", f"--vllm_mode {mode}")
        draft.set("rollout.urls", [address or f"http://{host}:{port}"], "--vllm_server_host, --vllm_server_port")
        draft.notes.append(("a server of theirs", "start a plain vLLM instead: tiercel serve RECIPE"))
        return
    draft.set("rollout.engine", "vllm", f"--vllm_mode {mode}")
    if share := launch.text("vllm_gpu_memory_utilization"):
        draft.set("rollout.vllm.gpu_memory_utilization", float(share), "--vllm_gpu_memory_utilization")
    if size := launch.text("vllm_tensor_parallel_size"):
        draft.set("rollout.vllm.tensor_parallel", int(size), "--vllm_tensor_parallel_size")
    if level := launch.text("sleep_level"):
        draft.set("rollout.vllm.sleep_level", int(level), "--sleep_level")


def _dataset(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    """Several files may be mixed by probabilities, which become weights against the first file's 1."""
    shares = [float(share) for share in launch.flags.get("interleave_prob", ())]
    if len(shares) == len(values) > 1 and min(shares) > 0:
        note = "an epoch there ends with the first file that is through; here it is as many rows as all files have"
        draft.notes.append((f"--dataset {' '.join(values)}", note))
        more = [{"weight": round(share / shares[0], 12)} for share in shares]
        _files(draft, "--dataset", values, more)
        return
    _files_end_to_end(draft, launch, "--dataset", values, [{} for _ in values])


def _data_file_paths(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    """VLM-R1's files and their folders of images, each list with colons between."""
    files, folders = values[0].split(":"), (launch.text("image_folders") or "").split(":")
    roots = folders if len(folders) == len(files) else [""] * len(files)
    more = [{"image_root": root} if root and len(files) > 1 else {} for root in roots]
    if roots[0]:
        draft.set("data.image_root", roots[0], "--image_folders")
    _files_end_to_end(draft, launch, "--data_file_paths", files, more)


def _image_folders(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    files = (launch.text("data_file_paths") or "").split(":")
    if len(values[0].split(":")) != len(files):
        draft.notes.append((f"--image_folders {values[0]}", "not one for each file; write data.image_root"))


def _files_end_to_end(
    draft: Draft, launch: Launch, flag: str, paths: Sequence[str], more: Sequence[dict[str, Any]]
) -> None:
    """Their numbers of rows are unknown here."""
    if len(paths) > 1:
        note = (
            f"{launch.framework} lays the files end to end, tiercel takes equal parts until data.mix.N.weight is set: "
            "each file's number of rows / that of the first"
        )
        draft.notes.append((f"{flag} {' '.join(paths)}", note))
    _files(draft, flag, paths, [{"weight": 1.0, **each} for each in more])


def _files(draft: Draft, flag: str, paths: Sequence[str], more: Sequence[dict[str, Any]]) -> None:
    draft.set("data.train", paths[0], flag)
    if len(paths) > 1:
        draft.set("data.mix", [{"path": path, **each} for path, each in zip(paths, more, strict=True)][1:], flag)


def _precision(name: str) -> Callable[[Draft, Launch, tuple[str, ...]], None]:
    def convert(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
        if values[0].lower() == "true":
            draft.set("model.dtype", name, f"--{'bf16' if name == 'bfloat16' else 'fp16'}")

    return convert


def _deepspeed(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    found = re.search(r"(?:zero|stage)[_-]?([0-3])", PurePath(values[0]).name)
    stage = 2 if found is not None and found[1] == "2" else 3
    if found is None or found[1] not in "23":
        draft.notes.append((f"--deepspeed {values[0]}", "stage 3 is taken; stages 2 and 3 are there"))
    draft.set("train.strategy", "deepspeed", "--deepspeed")
    draft.set("train.deepspeed.stage", stage, f"--deepspeed {values[0]}")
    if values[0].endswith(".json"):
        draft.notes.append((f"--deepspeed {values[0]}", "its stage is taken from its name; see train.deepspeed.config"))


def _dynamic(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    if values[0].lower() == "true":
        draft.set("rollout.resample_tries", launch.number("max_resample_times", 3), "--dynamic_sample")


def _switch(key: str, on: Any, off: Any) -> Callable[[Draft, Launch, tuple[str, ...]], None]:
    def convert(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
        draft.set(key, on if values[0].lower() == "true" else off, f"{key.rpartition('.')[2]} by a switch")

    return convert


def _model(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    draft.set("model.path", values[0], "--model")


def _sync(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    """Steps and mix only count where the switch is on; TRL's defaults else."""
    if values[0].lower() == "true":
        draft.set("algorithm.kl.sync_every", launch.number("ref_model_sync_steps", 512), "--ref_model_sync_steps")
        mix = float(launch.text("ref_model_mixup_alpha") or 0.6)
        draft.set("algorithm.kl.sync_mix", mix, "--ref_model_mixup_alpha")


def _trackers(draft: Draft, launch: Launch, values: tuple[str, ...]) -> None:
    known = allowed_words(keys_of("grpo")["trackers"].field.annotation)
    given = [word for value in values for word in re.split(r"[\s,]+", value.strip("[]")) if word not in ("", "none")]
    names = [name for name in dict.fromkeys(given) if name in known]
    if names:
        draft.set("trackers", names, "--report_to")
    for name in given:
        if name not in known:
            draft.notes.append((f"--report_to {name}", f"{NO_EQUIVALENT}; trackers are {', '.join(known)}"))


SPECIAL: dict[str, Callable[[Draft, Launch, tuple[str, ...]], None]] = {
    "model": _model,
    "dataset": _dataset,
    "data_file_paths": _data_file_paths,
    "image_folders": _image_folders,
    "bf16": _precision("bfloat16"),
    "fp16": _precision("float16"),
    "deepspeed": _deepspeed,
    "dynamic_sample": _dynamic,
    "overlong_filter": _switch("algorithm.overlong", "mask", "keep"),
    "mask_truncated_completions": _switch("algorithm.overlong", "mask", "keep"),
    "sync_ref_model": _sync,
    "report_to": _trackers,
    "kl_in_reward": _switch("algorithm.kl.place", "reward", "loss"),
}
JOINT = (_sizes, _tuner, _rewards, _loss, _clips, _advantage, _engine, _length)
JOINT_FLAGS = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "generation_batch_size",
    "steps_per_generation", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "advantage_estimator",
    "scale_rewards", "train_type", "tuner_type", "use_peft", "freeze_vit", "freeze_aligner", "freeze_llm",
    "freeze_vision_modules", "reward_funcs", "reward_weights", "reward_model", "use_vllm", "vllm_mode",
    "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "sleep_level",
    "ref_model_sync_steps", "ref_model_mixup_alpha",
    "warmup_ratio", "max_resample_times", "rlhf_type", "soft_max_length", "soft_cache_length", "cosine_max_len",
}  # fmt: skip
