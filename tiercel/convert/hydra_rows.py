"""Convert the rows and the rewards of EasyR1 and verl."""

import re
from typing import Any

from tiercel.convert.draft import RecipeDraft

_READ = {  # columns that are read under their own names
    "prompt": ("prompt",), "problem": ("problem", "question", "prompt"), "answer": ("answer", "solution"),
    "images": ("images", "image"), "videos": ("videos", "video"),
}  # fmt: skip
_CONTENT = re.compile(r"\{\{\s*content\s*(\|\s*trim\s*)?\}\}")


def set_hydra_rows(draft: RecipeDraft) -> None:
    """Set training rows, held-out rows, and the template of a question."""
    launch = draft.launch
    files = [_source(word) for word in launch.words("data.train_files")]
    if files:
        draft.set("data.train", files[0], "--data.train_files")
    if files[1:]:
        draft.set("data.mix", [{"path": path, "weight": 1.0} for path in files[1:]], "--data.train_files")
        text = (
            f"{launch.framework} puts the files end to end; tiercel takes equal parts until data.mix.N.weight is set: "
            "each file's number of rows / that of the first"
        )
        draft.note(text, "--data.train_files")
    held = [_source(word) for word in launch.words("data.val_files")]
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
    """Set the names of columns that no format reads. verl's question is a list of turns, EasyR1's is text."""
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
    """Return a data set of the hub as tiercel names it; `@split` is EasyR1's notation. Files stay as they are."""
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
        # Braces of the text itself are doubled, because data.prompt reads {name} as a column.
        parts = [part.replace("{", "{{").replace("}", "}}") for part in asked.split("{prompt}")]
        draft.set("data.prompt", "{prompt}".join(parts), f"--{name}", remark="its text")


def set_hydra_rewards(draft: RecipeDraft) -> None:
    """Set the rewards: a function of the user, a reward model, and a penalty on long completions."""
    launch = draft.launch
    entries = [_verl_function(draft)] if launch.framework == "verl" else [_easyr1_function(draft)]
    if launch.is_true("reward_model.enable"):
        path = launch.text("reward_model.model.path") or ""
        entries = [{"name": "model", "model": {"path": path}}]
        draft.note("a reward model scores there; rewards by rules may be added", "--reward_model.enable")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if launch.is_true(f"{overlong}.enable"):
        longest = launch.number("reward_model.reward_kwargs.max_resp_len") or draft.values.get(
            "rollout.max_new_tokens", 256
        )
        weight = launch.real(f"{overlong}.penalty_factor") or 1.0
        entry = {
            "name": "soft_overlong",
            "max_tokens": longest,
            "buffer": launch.number(f"{overlong}.len"),
            "weight": weight,
        }
        entries.append(entry)
    names = ("worker.reward.reward_function", "custom_reward_function.path", "custom_reward_function.name",
             "reward_model.model.path", f"{overlong}.enable", f"{overlong}.len", f"{overlong}.penalty_factor",
             "reward_model.reward_kwargs.max_resp_len")  # fmt: skip
    draft.set("rewards", entries, *(f"--{name}" for name in names), remark=" ")
    if launch.text("reward_model.reward_manager") not in (None, "naive", "dapo"):
        draft.note("docs/rewards.md says how rewards are called", "--reward_model.reward_manager")


def _verl_function(draft: RecipeDraft) -> dict[str, Any]:
    launch, name = draft.launch, "custom_reward_function.path"
    if path := launch.text(name):
        function = launch.text("custom_reward_function.name") or "compute_score"
        draft.note("is called with other arguments here: docs/rewards.md", f"--{name}", subject=f"{path}:{function}")
        return {"call": f"{path}:{function}"}
    text = (
        "verl chooses the reward by each row's data_source; here math, which compares by its own rules: docs/rewards.md"
    )
    draft.note(text, subject=f"no {name}")
    return {"name": "math"}


def _easyr1_function(draft: RecipeDraft) -> dict[str, Any]:
    launch, name = draft.launch, "worker.reward.reward_function"
    if path := launch.text(name):
        call = path if ":" in path else f"{path}:main"
        draft.note("is called with other arguments here: docs/rewards.md", f"--{name}", subject=call)
        return {"call": call}
    draft.note("name the rewards: rewards: [{name: math}]", subject=f"no {name}")
    return {"name": "math"}
