"""Converting rewards from the peers' names."""

from typing import Any

from tiercel.importing.draft import RecipeDraft, number_of
from tiercel.importing.plugins import registered

_BOX = r"\[\d+,\s*\d+,\s*\d+,\s*\d+\]"
_ANSWERED = r"<think>.*</think>\s*<answer>.*</answer>"
_PATTERNS = {
    "ms-swift": {"format": _ANSWERED, "react_format": r"<think>.*</think>\s*Action:.*Action Input:.*"},
    "TRL": {"think_format_reward": r"<think>(?!.*<think>).*</think>.*"},
    "VLM-R1": {"format": _ANSWERED},
}
_PLAIN: dict[str, dict[str, dict[str, Any]]] = {
    "ms-swift": {"accuracy": {"name": "math"}, "math": {"name": "math"}, "repetition": {"name": "repetition"}},
    "TRL": {
        "accuracy_reward": {"name": "math"},
        "reasoning_accuracy_reward": {"name": "math"},
        "get_soft_overlong_punishment": {"name": "soft_overlong", "max_tokens": 1280, "buffer": 256},
    },
    "VLM-R1": {},
}
_JUDGED = {  # VLM-R1's --reward_method, by the built-in that comes nearest
    **{"mcq": "choice", "yes_no": "exact", "math": "math", "llm": "judge"},
    **dict.fromkeys(("map", "od_ap", "od_ap50", "odLength"), "box_map"),
}
_SCRIPTED = {name: ("think_format_reward", "accuracy_reward") for name in ("grpo_vlm.py", "gspo_vlm.py", "rloo_vlm.py")}


def set_rewards(draft: RecipeDraft) -> None:
    """Set the list of rewards with their weights."""
    launch = draft.launch
    if launch.kind != "grpo":
        return
    names = launch.words("reward_funcs") or _SCRIPTED.get(launch.script, ())
    models = (*launch.words("reward_model"), *launch.words("reward_model_name_or_path"))
    entries = [_entry(draft, name) for name in names]
    entries += [{"name": "model", "model": {"path": path}} for path in models]
    for number, weight in enumerate(launch.words("reward_weights")[: len(entries)]):
        entries[number]["weight"] = float(number_of("--reward_weights", weight))
    labels = ("--reward_funcs", "--reward_model", "--reward_model_name_or_path", "--reward_weights")
    if entries:
        said = any(label in draft.given for label in labels)
        by_script = f"of {launch.script}" if launch.script in _SCRIPTED else f"{launch.framework}'s default"
        draft.set("rewards", entries, *labels, remark="" if said else by_script)
    else:
        draft.note("name the rewards: rewards: [{name: exact}]", subject="no --reward_funcs")


def _entry(draft: RecipeDraft, name: str) -> dict[str, Any]:
    launch = draft.launch
    if launch.framework == "VLM-R1" and name in ("accuracy", "format"):
        return _of_vlm_r1(draft, name)
    if (pattern := _PATTERNS[launch.framework].get(name)) is not None:
        return {"name": "format", "pattern": pattern}
    if name in ("cosine", "soft_overlong", "length"):
        return _with_length(draft, name)
    if name == "repetition":
        grams = launch.number("repetition_n_grams")
        draft.note("docs/rewards.md says what it counts", "--repetition_n_grams", subject="--reward_funcs repetition")
        return {"name": "repetition", "ngram": grams or 3}
    if name in _PLAIN[launch.framework]:
        if name in ("accuracy", "accuracy_reward", "math", "reasoning_accuracy_reward"):
            text = "compares by math-verify there; the built-in math has its own rules: docs/rewards.md"
            draft.note(text, subject=f"--reward_funcs {name}")
        return dict(_PLAIN[launch.framework][name])
    return _own(draft, name)


def _of_vlm_r1(draft: RecipeDraft, name: str) -> dict[str, Any]:
    """Convert VLM-R1's rewards: those of referring expressions, or the general ones by their method."""
    launch = draft.launch
    labels = ("--is_reward_customized_from_vlm_module", "--reward_method", "--task_type")
    is_rec = launch.script.startswith("grpo_rec") or launch.is_true("is_reward_customized_from_vlm_module")
    if name == "format":
        is_qwen = "qwen" in str(draft.values.get("model.path", "")).lower()
        box = rf".*\{{.*{_BOX}.*\}}.*" if is_qwen else rf".*{_BOX}.*"
        pattern = rf".*<think>.*</think>\s*<answer>{box}</answer>.*" if is_rec else _ANSWERED
        return {"name": "format", "pattern": pattern}
    if is_rec:
        draft.note("the reward of referring expressions: vlm_r1_rec", *labels, is_change=False)
        return {"name": "vlm_r1_rec"}
    method = launch.text("reward_method") or "default"
    known = _JUDGED.get(method.partition(":")[0])
    if known is None:
        text = f"accuracy judged by {method} has no equivalent: name a built-in (docs/rewards.md), or call a function"
        draft.note(text, *labels, subject="--reward_funcs accuracy")
        return {"call": "mine.py:accuracy"}
    draft.note(f"the built-in {known} comes nearest: docs/rewards.md", *labels)
    return {"name": known}


def _with_length(draft: RecipeDraft, name: str) -> dict[str, Any]:
    launch = draft.launch
    longest = int(draft.values.get("rollout.max_new_tokens", 256))
    if name == "cosine":
        longest = launch.number("cosine_max_len") or longest
        draft.note(f"ends at {longest} tokens", "--cosine_max_len", is_change=False, subject="--reward_funcs cosine")
        return {"name": "cosine", "max_tokens": longest}
    if name == "length":
        draft.note("falls from max_tokens on here: docs/rewards.md", subject="--reward_funcs length")
        return {"name": "length", "max_tokens": longest}
    longest, buffer = launch.number("soft_max_length") or longest, launch.number("soft_cache_length") or 50
    text = f"-1 from {longest} tokens on, falling over {buffer}"
    draft.note(
        text, "--soft_max_length", "--soft_cache_length", is_change=False, subject="--reward_funcs soft_overlong"
    )
    return {"name": "soft_overlong", "max_tokens": longest, "buffer": buffer}


def _own(draft: RecipeDraft, name: str) -> dict[str, Any]:
    """Convert a reward of the user: from a plugin file where it is found, else with a note."""
    launch = draft.launch
    if launch.framework == "TRL" and "." in name:
        module, _, function = name.rpartition(".")
        return {"call": f"{module}:{function}"}
    plugins = launch.words("external_plugins")
    for plugin in plugins:
        file = launch.file(plugin)
        found = registered(file).get(name) if file is not None else None
        if found is not None:
            draft.note(f"{name} is {found} of {plugin}", "--external_plugins", is_change=False)
            return {"call": f"{plugin}:{found}"}
    place = plugins[0] if plugins else "mine.py"
    asked = f"its name was not found in {place}" if plugins else "name its file"
    draft.note(f"{asked}; write rewards.N.call: FILE.py:CLASS or FILE.py:FUNCTION", "--external_plugins",
               subject=f"--reward_funcs {name}")  # fmt: skip
    return {"call": f"{place}:{name}"}
