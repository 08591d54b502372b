"""Converting the rows and the rewards of EasyR1 and verl."""

import re
from typing import Any

from tiercel.convert.draft import RecipeDraft
from tiercel.convert.rows import NamedRows, end_to_end

_READ = {  # columns that are read by their own names
    "prompt": ("prompt",), "problem": ("problem", "question", "prompt"), "answer": ("answer", "solution"),
    "images": ("images", "image"), "videos": ("videos", "video"),
}  # fmt: skip
_CONTENT = re.compile(r"\{\{\s*content\s*(\|\s*trim\s*)?\}\}")


def set_hydra_rows(draft: RecipeDraft) -> None:
    """Set training rows, held-out rows, and the template of a question."""
    sources = [NamedRows(path=_source(word)) for word in draft.launch.words("data.train_files")]
    end_to_end(draft, sources, "--data.train_files")
    held = [_source(word) for word in draft.launch.words("data.val_files")]
    if held:
        draft.set("data.eval", held[0], "--data.val_files")
    if held[1:]:
        draft.note("data.eval is one file; put the rows into one", "--data.val_files")
    if "data.eval" not in draft.values:
        draft.drop("train.eval_every")
        draft.note("no rows are held out, so there is nothing to evaluate", "--trainer.test_freq", "--trainer.val_freq")
    _columns(draft)
    _template(draft)


def _columns(draft: RecipeDraft) -> None:
    """Set the names of columns that no format reads. verl's question is a list of turns, EasyR1's a text."""
    named = {"prompt_key": "prompt" if draft.launch.framework == "verl" else "problem", "answer_key": "answer",
             "image_key": "images", "video_key": "videos"}  # fmt: skip
    columns, labels = {}, []
    for key, name in named.items():
        label = f"--data.{key}"
        given = draft.launch.text(f"data.{key}")
        if given is None or given in _READ.get(name, (name,)):
            draft.note("is read by this name", label, is_change=False)
        else:
            columns[name] = given
            labels.append(label)
    if columns:
        draft.set("data.columns", columns, *labels)


def _source(word: str) -> str:
    """Write a data set of the hub as tiercel does; `@split` is EasyR1's. Files stay."""
    path, _, split = word.partition("@")
    if re.search(r"\.(json|jsonl|parquet|arrow)$", path) or path.startswith((".", "/", "~", "$")) or "/" not in path:
        return path if not split else f"{path}@{split}"
    return f"hf:{path}:{split or 'train'}" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else word


def _template(draft: RecipeDraft) -> None:
    launch, name = draft.launch, "data.format_prompt"
    if not (path := launch.text(name)):
        return
    file = launch.file(path)
    text = "" if file is None else file.read_text(encoding="utf-8").strip()
    asked = _CONTENT.sub("{prompt}", text)
    if file is None:
        draft.note("the file is not here; write its text into data.prompt, with {prompt} for the question", f"--{name}")
    elif re.search(r"\{\{|\{%", asked) or "{prompt}" not in asked:
        draft.note("is more than a text around the question; write data.prompt, with {prompt} in it", f"--{name}")
    else:
        # Brackets of the text itself are doubled, since data.prompt reads {name} as a column.
        parts = [part.replace("{", "{{").replace("}", "}}") for part in asked.split("{prompt}")]
        draft.set("data.prompt", "{prompt}".join(parts), f"--{name}", remark="its text")


def set_hydra_rewards(draft: RecipeDraft) -> None:
    """Set the rewards: a function of the user's, a reward model, and a penalty on long completions."""
    launch, kwargs = draft.launch, "reward_model.reward_kwargs"
    entries = [_function(draft)]
    if launch.is_true("reward_model.enable"):
        entries = [{"name": "model", "model": {"path": launch.text("reward_model.model.path") or ""}}]
        draft.note("a reward model scores there; rewards by rules may be added", "--reward_model.enable")
    enable, length, factor = (f"{kwargs}.overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor"))
    if launch.is_true(enable):
        longest = launch.number(f"{kwargs}.max_resp_len") or draft.values.get("rollout.max_new_tokens", 256)
        own = {"max_tokens": longest, "buffer": launch.number(length), "weight": launch.real(factor) or 1.0}
        entries.append({"name": "soft_overlong", **own})
    names = ("worker.reward.reward_function", "custom_reward_function.path", "custom_reward_function.name",
             "reward_model.model.path", enable, length, factor, f"{kwargs}.max_resp_len")  # fmt: skip
    draft.set("rewards", entries, *(f"--{name}" for name in names), remark=" ")
    if launch.text("reward_model.reward_manager") not in (None, "naive", "dapo"):
        draft.note("docs/rewards.md says how rewards are called", "--reward_model.reward_manager")


def _function(draft: RecipeDraft) -> dict[str, Any]:
    """Return the user's own reward, or the nearest built-in one."""
    launch, is_verl = draft.launch, draft.launch.framework == "verl"
    name = "custom_reward_function.path" if is_verl else "worker.reward.reward_function"
    if path := launch.text(name):
        function = (launch.text("custom_reward_function.name") or "compute_score") if is_verl else "main"
        call = path if ":" in path and not is_verl else f"{path}:{function}"
        draft.note("is called with other arguments here: docs/rewards.md", f"--{name}", subject=call)
        return {"call": call}
    text = "name the rewards: rewards: [{name: math}]"
    if is_verl:
        text = "verl chooses the reward by each row's data_source; here math, which compares by its own rules"
        text += ": docs/rewards.md"
    draft.note(text, subject=f"no {name}")
    return {"name": "math"}
