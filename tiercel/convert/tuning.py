"""Convert what is trained and how: adapters and parts, learning rates, precision, sharding, trackers."""

import json
import re
from pathlib import Path, PurePath

from tiercel.config.keys import allowed_words, keys_of
from tiercel.config.trained_parts import PARTS
from tiercel.convert.accelerate import FSDP, STAGE, Sharding, sharding_by_name, sharding_of_json
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.preferences import needs_reference
from tiercel.convert.table import OVERRIDING, Framework, words_of
from tiercel.convert.values import mapping_in, whole_number_of

_FREEZERS: dict[Framework, tuple[str, ...]] = {  # in the order of PARTS
    "ms-swift": ("freeze_vit", "freeze_aligner", "freeze_llm"),
    "LLaMA-Factory": ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"),
}
_FREEZE_NAMES = (
    *(name for names in _FREEZERS.values() for name in names), "freeze_vision_modules", "train_mm_proj_only",
)  # fmt: skip
_QUANTISING = (
    "load_in_8bit", "load_in_4bit", "quant_bits", "quant_method", "quantization_bit", "quantization_method",
    "bnb_4bit_quant_type", "quantization_type",
)  # fmt: skip
TUNERS = ("tuner_type", "train_type", "finetuning_type")
_TOKENS = re.compile(r"(IMAGE|VIDEO)_(MAX|MIN)_TOKEN_NUM")
_TUNER_LABELS = (*TUNERS, "use_peft")


def set_tuning(launch: Launch, draft: RecipeDraft) -> None:
    """Set everything except rows, sizes and sampling."""
    for step in (_model, _quantised, _adapters, _parts, _rates, _precision, _sharding, _kept_reference, set_trackers):
        step(launch, draft)


def _model(launch: Launch, draft: RecipeDraft) -> None:
    if path := launch.text("model"):
        draft.set("model.path", path, "model")
        if launch.is_true("use_hf") or launch.environment.get("USE_HF", "0").lower() in ("1", "true"):
            draft.set("model.hub", "huggingface", "use_hf", "USE_HF")
        elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
            for key in ("model.hub", "teacher.hub"):
                draft.set(key, "modelscope", "use_hf", "USE_HF", remark="ms-swift's default")
        if "output" not in draft.values:
            draft.set("output", f"output/{PurePath(path).name}", remark="ms-swift's default")
    if (revision := launch.text("model_revision")) not in (None, "main"):
        draft.set("model.revision", revision, "model_revision")
    if launch.framework == "VLM-R1" and "qwen" not in draft.model_name:
        labels = draft.drop("model.max_pixels", "model.min_pixels")
        draft.note("is read for Qwen's models only", *labels, is_change=False)
    side = 32 if re.search(r"qwen3", path or "", re.IGNORECASE) else 28
    for name in sorted(launch.environment):
        if found := _TOKENS.fullmatch(name):
            key = f"{'model' if found[1] == 'IMAGE' else 'data.video'}.{found[2].lower()}_pixels"
            pixels = whole_number_of(name, launch.environment[name]) * side * side
            draft.set(key, pixels, name, remark=f"tokens of {side} x {side} pixels")


def _quantised(launch: Launch, draft: RecipeDraft) -> None:
    """Set how the base model is quantised, if bitsandbytes quantises it to 8 bits or to NF4."""
    by_switch = next((bits for bits in ("8", "4") if launch.is_true(f"load_in_{bits}bit")), None)
    bits = by_switch or launch.text("quant_bits", "quantization_bit")
    numbers = launch.text("bnb_4bit_quant_type", "quantization_type") or "nf4"
    kind = {"8": "int8", "4": "nf4" if numbers == "nf4" else None}.get(bits or "")
    is_known = (launch.text("quant_method", "quantization_method") or "bnb") in ("bnb", "bitsandbytes")
    if is_known and kind is not None:
        draft.set("model.quantize", kind, *_QUANTISING)
    elif bits is not None or not is_known:
        draft.note("has no equivalent: model.quantize is nf4 or int8, by bitsandbytes", *_QUANTISING)


def tuner_of(launch: Launch) -> str:
    """Return the tuner: full, lora, lora_llm, or another name."""
    if launch.framework in OVERRIDING:
        ranks = ("actor_rollout_ref.model.lora_rank", "worker.actor.model.lora.rank")
        return "lora" if launch.text(*ranks) not in (None, "0") else "full"
    return launch.text(*TUNERS) or ("lora" if launch.is_true("use_peft") else "full")


def _adapters(launch: Launch, draft: RecipeDraft) -> None:
    tuner = tuner_of(launch)
    rank = "lora_rank" if "lora_rank" in launch.rows else "lora_r"
    if tuner == "full":
        if launch.framework in ("TRL", "VLM-R1"):
            text = f"without --use_peft {launch.framework} trains all weights, and so does this recipe"
            draft.note(text, "lora_r", "lora_alpha", "lora_target_modules")
        return
    alpha = launch.real("lora_alpha") or 2.0 * (launch.number(rank) or 1)
    for key, name, value in (("lora.rank", rank, launch.number(rank)), ("lora.alpha", "lora_alpha", alpha)):
        draft.set(key, value, name, *_TUNER_LABELS, remark=launch.default_remark(name))
    dropout = 0.0 if tuner == "lora_llm" else launch.real("lora_dropout") or 0.0
    if tuner == "lora_llm":
        draft.note("lora_llm has no dropout in ms-swift", "lora_dropout", is_change=False)
    if launch.is_true("disable_dropout"):
        dropout = 0.0
        text = f"is off in this method, in {launch.framework} as in tiercel"
        draft.note(text, "lora_dropout", "disable_dropout", is_change=False)
    if dropout and launch.kind != "sft":
        draft.set("lora.dropout", 0.0, "lora_dropout", remark=f"{dropout:g} in {launch.framework}; see above")
        text = f"{dropout:g} in {launch.framework}, 0 in tiercel: answers share a prompt"
        text = f"{text}; to have it, write learner.form: repeated too"
        draft.note(text, "lora_dropout", subject=f"--lora_dropout {dropout:g}")
    elif dropout or "lora_dropout" in launch.flags:
        draft.put("lora.dropout", dropout, "lora_dropout")
    _targets(launch, draft, tuner)
    if isinstance(adapter := draft.values.get("lora.init"), str):
        _as_given(launch, draft, adapter)


def _as_given(launch: Launch, draft: RecipeDraft, adapter: str) -> None:
    """Describe the adapter to continue from by its own config, which the peers read instead of the flags."""
    given = mapping_in(launch.file(f"{adapter}/adapter_config.json"), json.loads)
    if given is None:
        keys = "lora.rank, alpha, kind and targets"
        draft.note(f"{adapter}/adapter_config.json is not on this machine; write its {keys}", subject="lora.init")
        return
    kind = "dora" if given.get("use_dora") else "rslora" if given.get("use_rslora") else "lora"
    targets = given.get("target_modules")
    if isinstance(targets, list):
        targets = rf"(.*\.)?({'|'.join(re.escape(str(name)) for name in sorted(targets))})"
    targets = "all" if targets == "all-linear" else targets
    found = {"rank": given.get("r"), "alpha": given.get("lora_alpha"), "kind": kind, "targets": targets}
    for key, value in found.items():
        if value is not None:
            draft.set(f"lora.{key}", value, remark=f"as {adapter} has it")


def _targets(launch: Launch, draft: RecipeDraft, tuner: str) -> None:
    """Set which linear layers have adapters. Parts in `freeze`, and the language model, then keep their own weights."""
    names = ("target_regex", "target_modules", "lora_target_modules", "lora_target")
    flags = (*names, *_FREEZE_NAMES)
    modules = launch.parts(r"[,\s\[\]'\"]+", *names[1:])
    if launch.framework != "VLM-R1" and (left := [name for name in modules if name in ("lm_head", "embed_tokens")]):
        modules = [name for name in modules if name not in left]
        text = "tiercel has no adapters on the head and the embeddings, and leaves both as they are"
        draft.note(text, *names[1:], subject=f"lora.targets without {' and '.join(left)}")
    if tuner == "lora_llm":
        draft.set("lora.targets", "language", "tuner_type", "train_type", *flags)
        draft.set("freeze", [], "tuner_type", "train_type", *flags, remark="tower and projector are trained whole")
    elif launch.framework == "VLM-R1":
        draft.set("lora.targets", "language", "lora_target_modules", remark="linear layers outside the vision tower")
        outside = ", and the projector of InternVL" if "internvl" in draft.model_name else ""
        text = f"VLM-R1 has adapters on lm_head{outside} too, tiercel on the decoder's layers"
        draft.note(text, subject="lora.targets")
    elif regex := launch.text("target_regex") or _pattern(launch):
        draft.set("lora.targets", regex, *flags)
    elif {"all-linear", "all"} & set(modules) and launch.framework in _FREEZERS:
        _all_linear(launch, draft, flags)
    elif "all-linear" in modules:
        draft.set("lora.targets", "all", *flags)
    elif modules:
        words = "|".join(re.escape(word) for word in modules)
        draft.set("lora.targets", rf"(.*\.)?({words})", *flags, remark="as names end")
        if launch.framework == "LLaMA-Factory":
            text = "LLaMA-Factory leaves out layers of frozen parts; tiercel takes all that the pattern matches"
            draft.note(text, "lora_target")
    else:
        draft.set("lora.targets", "language", remark="no layers are given")
        draft.note(f"in {launch.framework} PEFT chooses them by the model type", subject="no --lora_target_modules")


def _pattern(launch: Launch) -> str | None:
    """Return the only word of TRL's flag if it is a pattern, which PEFT matches with the whole name of a layer."""
    words = launch.words("lora_target_modules") if launch.framework == "TRL" else ()
    is_pattern = len(words) == 1 and re.search(r"[\\*(|^+?]|(?!^)\[", words[0])
    return words[0] if is_pattern else None


def _all_linear(launch: Launch, draft: RecipeDraft, flags: tuple[str, ...]) -> None:
    """Set the linear layers of the parts that are not frozen."""
    adapted = [part for part in PARTS if part not in _frozen(launch, draft)]
    if launch.framework == "LLaMA-Factory" and adapted[-2:] == ["projector", "language"]:
        adapted = adapted if "vision" in adapted else ["language"]
        text = "of most models the projector gets no adapters from LLaMA-Factory's `all`, whether it is frozen or not"
        draft.note(text, "freeze_multi_modal_projector", is_change="vision" in adapted)
    is_said = {"target_modules", "lora_target"} & set(launch.flags)
    remark = "" if is_said else f"{launch.framework}'s default, all linear layers"
    draft.set("lora.targets", adapted[0] if len(adapted) == 1 else "all", *flags, remark=remark)
    if len(adapted) not in (1, 3):
        text = f"only {' and '.join(adapted)} in {launch.framework}"
        text = f"{text}; lora.targets takes one part, all, or a regular expression"
        draft.note(text, *flags, subject="lora.targets: all")


def _frozen(launch: Launch, draft: RecipeDraft) -> list[str]:
    """Return the parts that the peer freezes, in the order of the schema."""
    if launch.is_true("freeze_vision_modules"):  # VLM-R1's
        return ["vision"] if "internvl" in draft.model_name else ["vision", "projector"]
    if launch.is_true("train_mm_proj_only"):  # LLaMA-Factory's until 2025
        return ["vision", "language"]
    flags = _FREEZERS.get(launch.framework, ())
    return [part for part, flag in zip(PARTS, flags, strict=False) if launch.is_true(flag)]


def _parts(launch: Launch, draft: RecipeDraft) -> None:
    """Set the frozen parts of full fine-tuning."""
    if tuner_of(launch) == "full":
        draft.put("freeze", _frozen(launch, draft), *_FREEZE_NAMES, *_TUNER_LABELS)


def _rates(launch: Launch, draft: RecipeDraft) -> None:
    tuner = tuner_of(launch)
    rate = launch.real("learning_rate")
    if rate is None:
        rate = 1e-5 if tuner == "full" else 1e-4
    draft.put("optim.lr", rate, "learning_rate")
    betas = [launch.real("adam_beta1") or 0.9, launch.real("adam_beta2") or 0.999]
    if betas != [0.9, 0.999] or {"adam_beta1", "adam_beta2"} & {*launch.flags}:
        draft.put("optim.betas", betas, "adam_beta2", "adam_beta1")
    stays, targets = draft.values.get("freeze", ["vision", "projector"]), draft.values.get("lora.targets")
    for part in ("vision", "projector"):
        if targets not in ("all", part) if tuner == "lora" else part in stays:
            draft.drop(f"optim.part_lr.{part}")
    for name in ("optim", "optimizer"):
        given = launch.text(name) or ""
        if kind := words_of(name).get(given):
            draft.set("optim.name", kind, name)
            continue
        is_same = given.startswith("adamw")
        text = "AdamW, as in tiercel" if is_same else "tiercel takes AdamW: the section optim"
        draft.note(text, name, is_change=not is_same)


def _precision(launch: Launch, draft: RecipeDraft) -> None:
    """Set the dtype of the computation. TRL takes bfloat16 by default, whatever dtype the weights are loaded in."""
    labels = ("bf16", "fp16", "dtype", "torch_dtype", "launcher --mixed_precision")
    in_file = launch.accelerate.precision if launch.accelerate else ""
    mixed = launch.launcher.get("mixed_precision", ("",))[0] or in_file
    loaded = (launch.text("dtype", "torch_dtype") or "").lower()
    if launch.is_true("fp16"):
        draft.set("model.dtype", "float16", *labels)
    elif launch.is_true("bf16") or (launch.text("bf16") or "").startswith("$"):  # computed, as by is_bf16_supported()
        draft.set("model.dtype", "bfloat16", *labels)
    elif launch.framework == "TRL" and "bf16" not in launch.flags:
        draft.set("model.dtype", "bfloat16", *labels, remark="TRL's default, --bf16")
    elif mixed in ("fp16", "bf16"):  # which transformers takes if its own flags are off
        draft.set("model.dtype", "float16" if mixed == "fp16" else "bfloat16", *labels)
    elif launch.framework in ("TRL", "VLM-R1"):
        draft.set("model.dtype", loaded if loaded in ("bfloat16", "float16") else "float32", *labels)


def _sharding(launch: Launch, draft: RecipeDraft) -> None:
    of_launcher = [f"launcher --{name}" for name in ("config_file", "accelerate_config", "zero_stage")]
    labels = ("deepspeed", "fsdp", *of_launcher)
    found, remark = _asked(launch, draft)
    if found and found["train.strategy"] == "ddp":
        remark = "stage 0 divides nothing"
        if launch.processes == 1:
            draft.note("divides nothing, as tiercel with a single process", *labels, is_change=False)
            return
    for key, value in (found or {}).items():
        if key == STAGE and value == 1:
            value, remark = 2, "stage 1 divides the optimiser's state only; tiercel has stages 2 and 3"
        draft.set(key, value, *labels, remark=remark)


def _asked(launch: Launch, draft: RecipeDraft) -> tuple[Sharding | None, str]:
    """Return how the command shards the model, and a remark if only a file's name says so."""
    if words := launch.words("deepspeed"):
        return _deepspeed(launch, draft, words[0])
    if words := launch.words("fsdp"):
        return (FSDP if words[0].strip("'\"") not in ("", "no", "false") else None), ""
    if launch.accelerate is not None:
        return launch.accelerate.sharding, ""
    if stage := launch.launcher.get("zero_stage"):
        return sharding_by_name(f"zero{stage[0]}"), ""
    if named := launch.launcher.get("config_file") or launch.launcher.get("accelerate_config"):
        label = "launcher --config_file" if "config_file" in launch.launcher else "launcher --accelerate_config"
        found = sharding_by_name(PurePath(named[0]).name)
        text = "the file is not on this machine"
        text = f"{text}: sharding is taken from its name" if found else text
        unknown = "; how many processes it starts is unknown: optim.prompts_per_step is that of 1"
        draft.note(text if launch.process_labels else f"{text}{unknown}", label)
        return found, "by the file's name"
    return None, ""


def _deepspeed(launch: Launch, draft: RecipeDraft, value: str) -> tuple[Sharding | None, str]:
    """Read a DeepSpeed config: JSON, a file of it, or else its name."""
    name, is_file = PurePath(value).name, value.endswith(".json")
    config = value if value.startswith("{") else launch.file(value) if is_file else None
    found = sharding_by_name(name) if config is None else sharding_of_json(mapping_in(config, json.loads))
    if config is not None and found is None:
        draft.note("no stage of ZeRO was found in it; write train.deepspeed.stage", "deepspeed")
    elif found is None:
        draft.note("the file is not on this machine; write train.strategy: deepspeed with stage 2 or 3", "deepspeed")
    elif config is None and is_file:
        text = "the file is not on this machine: its stage is taken from its name; see train.deepspeed.config"
        draft.note(text, "deepspeed")
    if not isinstance(config, Path):
        return found, ""
    draft.note("its stage and offloads are taken over; for the rest see train.deepspeed.config", "deepspeed")
    return found, f"read from {name}"


def _kept_reference(launch: Launch, draft: RecipeDraft) -> None:
    """Set where full fine-tuning with a reference keeps its copy of the start."""
    if tuner_of(launch) == "full" and needs_reference(draft):
        place = "cpu" if draft.values.get("train.deepspeed.offload_parameters") else "device"
        draft.set("model.reference", place, remark="the reference of full fine-tuning")


def set_trackers(launch: Launch, draft: RecipeDraft, flag: str = "report_to") -> None:
    """Set where metrics go beside the run directory."""
    name = launch.spelt(flag)
    known = allowed_words(keys_of("grpo")["trackers"].field.annotation)
    words = dict.fromkeys(launch.parts(r"[\s,'\"\[\]]+", flag))
    given = [word for word in words if word not in ("none", "console", "file")]
    if flag not in launch.flags:
        if given:
            draft.note(f"trackers: [{', '.join(given)}] writes the same", subject=f"{name} is {given[0]} by default")
        return
    draft.set("trackers", [word for word in given if word in known], flag)
    if others := [word for word in given if word not in known]:
        text = f"{', '.join(others)} has no equivalent; trackers are {', '.join(known)}"
        draft.note(text, flag, subject=f"{name} {' '.join(others)}")
