"""Converting what concerns rows: data sets, held-out rows, system messages, question templates, limits of length."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any

from tiercel.config.yaml_text import parse
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.manual_steps import rows_of_modelscope
from tiercel.convert.table import PEERS
from tiercel.convert.values import mapping_in, number_of, split_count
from tiercel.message_text import counted
from tiercel.tables import table_rows

_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".yaml")
_NO_ROWS = "is no file of rows that tiercel reads; write .jsonl, .json or .parquet"
_READ = (".json", ".jsonl", ".parquet")
# What each column of dataset_info.json is called if it says nothing; tiercel reads these names so.
_MEANINGS = {
    "prompt": "instruction", "query": "input", "response": "output", "history": "history", "messages": "conversations",
    "system": "system", "images": "images", "videos": "videos", "chosen": "chosen", "rejected": "rejected",
    "kto_tag": "kto_tag",
}  # fmt: skip
# Further columns and tags that data.format reads.
_COLUMNS = {
    *_MEANINGS.values(), "messages", "label", "from", "value", "role", "content", "human", "user", "gpt", "assistant",
    "observation", "function_call",
}  # fmt: skip
EXAMPLE_SCRIPTS = ("grpo_vlm.py", "gspo_vlm.py", "rloo_vlm.py")


@cache
def _requests() -> dict[tuple[str, str], str]:
    """Read what the peers ask of the model beside the question, by peer and task."""
    rows = table_rows(PEERS, "requests.txt")
    return {(peer, task): parse(text)[0] for peer, tasks, text in rows for task in tasks.split(", ")}


def set_rows(launch: Launch, draft: RecipeDraft) -> None:
    """Set the sources of rows, and how they are used."""
    readers = {"TRL": _trl, "VLM-R1": _vlm_r1}
    readers.get(launch.framework, _joined)(launch, draft)
    _held_out(launch, draft)
    if launch.kind == "distill" and "data.eval" in draft.values:
        text = "in tiercel rewards score what is held out: write both, data.eval and rewards"
        draft.note(text, *draft.drop("data.eval"))
    for step in (_columns, _shuffle, _system, _thinking, _limits, _turns):
        step(launch, draft)


def _joined(launch: Launch, draft: RecipeDraft) -> None:
    """Set files that are mixed by the shares of a flag, or else put end to end."""
    is_swift = launch.framework == "ms-swift"
    read, flag = (_swift_source, "interleave_prob") if is_swift else (_described, "interleave_probs")
    sources = [read(launch, draft, name, "dataset") for name in _listed_words(launch, "dataset")]
    shares = [float(number_of(f"--{flag}", share)) for share in _listed_words(launch, flag)]
    if len(shares) == len(sources) > 1 and min(shares) > 0:
        weights = [round(share / shares[0], 12) for share in shares]
        _mix(draft, sources, weights, "dataset", flag)
        note = f"{launch.framework} ends an epoch with the first exhausted file; tiercel's has the rows of all files"
        draft.note(note, flag)
    else:
        end_to_end(draft, sources, "dataset", "max_samples", "dataset_dir")


def _columns(launch: Launch, draft: RecipeDraft) -> None:
    """Set the names of columns. ms-swift writes the file's name first and its own second, data.columns the reverse."""
    if (text := launch.text("columns")) is None:
        return
    names = mapping_in(text, json.loads)
    if names is None or not all(isinstance(name, str) for name in names.values()):
        draft.note("is no JSON object of names; write data.columns", "columns")
        return
    column_names = {name: given for given, name in names.items() if name != given}
    if column_names:
        draft.set("data.columns", column_names, "columns")
    else:
        draft.note("gives no column another name", "columns", is_change=False)


def _listed_words(launch: Launch, flag: str) -> list[str]:
    """Return a flag's words; in LLaMA-Factory they have commas between."""
    return launch.parts(r"[,\s\[\]]+" if launch.framework == "LLaMA-Factory" else "$", flag)


def _described(launch: Launch, draft: RecipeDraft, name: str, flag: str) -> str:
    """Look a data set up in dataset_info.json."""
    limit = launch.number("max_samples")
    folder = launch.text("dataset_dir") or "data"
    subject = f"--{flag} {name}"
    if folder == "ONLINE":
        _tell_limit(draft, name)
        return _limited(f"hf:{name}", limit)
    entry = (mapping_in(launch.file(f"{folder}/dataset_info.json"), json.loads) or {}).get(name)
    if not isinstance(entry, dict):
        text = f"{folder}/dataset_info.json is not on this machine, or has no such entry; write the file that it names"
        draft.note(text, flag, "dataset_dir", subject=subject)
        _tell_limit(draft, name)
        return _limited(name, limit)
    _tell_columns(draft, entry, flag, subject)
    rows = min(filter(None, (entry.get("num_samples"), limit)), default=None)
    if limit is not None and rows == limit:
        path = str(PurePath(folder, str(entry.get("file_name"))))
        count = _counted(draft, path)
        if count is None:
            _tell_limit(draft, name)
        elif count <= limit:
            rows = None
            draft.note(f"{path} has {counted(count, 'row')}, so all are taken", "max_samples", is_change=False)
    if url := entry.get("hf_hub_url") or entry.get("ms_hub_url"):
        if "hf_hub_url" not in entry:
            draft.note("an id of ModelScope, where hf: asks Hugging Face's hub", flag, subject=subject)
            rows_of_modelscope(draft, url, subject)
        subset = f"/{entry['subset']}" if entry.get("subset") else ""
        return _limited(f"hf:{url}{subset}:{entry.get('split', 'train')}", rows)
    path = str(entry.get("file_name") or entry.get("script_url") or entry.get("cloud_file_name"))
    if PurePath(path).suffix not in _READ:
        draft.note(f"{path} {_NO_ROWS}", flag, subject=subject)
    return _limited(str(PurePath(folder, path)), rows)


def _tell_columns(draft: RecipeDraft, entry: Mapping[str, Any], flag: str, subject: str) -> None:
    """Note columns that tiercel does not read, or reads with another meaning."""
    columns, tags = (entry.get(part) or {} for part in ("columns", "tags"))
    if strange := sorted({*map(str, columns.values()), *map(str, tags.values())} - _COLUMNS):
        draft.note(f"{', '.join(strange)}: docs/data.md says which columns are read", flag, subject=subject)
    meanings = {name: given for name, given in columns.items() if given in _MEANINGS.values()}
    if swapped := [f"{name}: {given}" for name, given in meanings.items() if _MEANINGS.get(name) != given]:
        text = "tiercel reads columns of these names with another meaning; rename them in the file"
        draft.note(f"{', '.join(swapped)}: {text}", flag, subject=subject)


def _limited(source: str, rows: int | None) -> str:
    """Name rows as data.train does, if only so many of them are taken."""
    return source if rows is None else f"{source}#{rows}"


def _tell_limit(draft: RecipeDraft, name: str) -> None:
    """Note that tiercel takes an exact number of rows, when the file cannot be read to compare it with the limit."""
    text = f"{draft.launch.framework} takes at most so many rows, tiercel exactly so many"
    draft.note(f"{text}; where {name} has fewer, take away the # and the number", "max_samples")


def _swift_source(launch: Launch, draft: RecipeDraft, word: str, flag: str) -> str:
    """Read a source of the form `path#N` or `id:subset#N`, perhaps with HF:: or MS:: before it."""
    text, rows = split_count(word)
    hub, mark, rest = text.partition("::")
    text = rest if mark and hub.upper() in ("HF", "MS") else text
    is_id, suffix = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", text), PurePath(text).suffix
    if not is_id or suffix in _FILES or text.startswith((".", "~")) or launch.file(text):
        if suffix in _FILES and suffix not in _READ:
            draft.note(f"{text} {_NO_ROWS}", flag, subject=f"--{flag} {word}")
        return _limited(text, rows)
    name, _, subset = text.partition(":")
    parts = [f"one subset a source: {subset} are several"] if "/" in subset else []
    if hub.upper() != "HF" and not launch.is_true("use_hf"):
        parts.append("an id of ModelScope, where hf: asks Hugging Face's hub: see that it has the same rows")
        rows_of_modelscope(draft, name, f"--{flag} {word}")
    if parts:
        draft.note(f"{'; '.join(parts)}; or save the rows to a file", flag, subject=f"--{flag} {word}")
    return _limited(f"hf:{name}/{subset}" if subset and "/" not in subset else f"hf:{name}", rows)


def _trl(launch: Launch, draft: RecipeDraft) -> None:
    labels: tuple[str, ...] = ("dataset_name", "dataset_config", "dataset_train_split")
    name, split = launch.text("dataset_name"), launch.text("dataset_train_split") or "train"
    remark = f"of {launch.script}" if launch.script in EXAMPLE_SCRIPTS else ""
    if remark:
        if name:
            draft.note(f"{launch.script} does not read it; write data.train", "dataset_name")
        name, labels = "lmms-lab/multimodal-open-r1-8k-verified", ()
        draft.note(
            "takes lmms-lab/multimodal-open-r1-8k-verified, holds 100 rows out, leaves out pictures of 512 pixels and "
            "more a side (no key does: filter the rows), and asks for <think> tags in a system message of its own",
            subject=launch.script,
        )
        draft.set("data.eval", {"count": 100}, remark=remark)
        asked = f"{launch.script} asks for these tags; the wording is tiercel's"
        draft.set("data.system", _requests()["TRL", ""], remark=asked)
    if name is None:
        return
    is_local = PurePath(name).suffix in _READ or name.startswith((".", "/", "~")) or "/" not in name
    path = name if is_local else f"hf:{name}{_subset(launch)}:{split}"
    if PurePath(name).suffix in _READ and split != "train":
        draft.note(f"{name} has no splits; #N behind it takes N rows", "dataset_train_split")
    draft.set("data.train", path, *labels, remark=remark)


def _vlm_r1(launch: Launch, draft: RecipeDraft) -> None:
    """Set files with their folders, and the request that VLM-R1 adds to every question."""
    if words := launch.words("data_file_paths"):
        files, roots = words[0].split(":"), ":".join(launch.words("image_folders")).split(":")
        if len(roots) != len(files) or not all(roots):
            roots = [""] * len(files)
            draft.note("not one folder for each file; write data.image_root", "image_folders")
        end_to_end(draft, files, "data_file_paths", "image_folders", roots=roots)
    elif name := launch.text("dataset_name"):
        _listed(draft, name)
    task = launch.text("task_type") or ("rec" if launch.script.startswith("grpo_rec") else "")
    text = _requests().get(("VLM-R1", task if "qwen" in draft.model_name else ""), _requests()["VLM-R1", ""])
    remark = "VLM-R1 adds a request for the tags its rewards need; the wording is tiercel's"
    draft.set("data.prompt", text, "task_type", remark=remark)


def _listed(draft: RecipeDraft, name: str) -> None:
    """Set the files that grpo_rec.py's YAML file lists, or a data set of grpo.py."""
    entries = (mapping_in(draft.launch.file(name)) or {}).get("datasets") or []
    files = [str(entry["json_path"]) for entry in entries if isinstance(entry, dict) and "json_path" in entry]
    if files:
        end_to_end(draft, files, "dataset_name")
        if any("sampling_strategy" in entry for entry in entries):
            draft.note("its sampling_strategy is not taken over; write path#N in data.train", "dataset_name")
    elif name.endswith(".yaml"):
        draft.set("data.train", name, "dataset_name")
        text = "the list of files is not on this machine; write the files into data.train and data.mix"
        draft.note(text, "dataset_name")
    else:
        draft.set("data.train", f"hf:{name}", "dataset_name")


def end_to_end(draft: RecipeDraft, sources: Sequence[str], *labels: str, roots: Sequence[str] = ()) -> None:
    """Set files that the peer puts end to end, with the folders of their images. The weight of a file is its number of
    rows divided by that of the first, where these are known."""
    known = [count for source in sources if (count := _counted(draft, source))]
    is_known = len(known) == len(sources)
    weights = [round(count / known[0], 6) for count in known] if is_known else [1.0] * len(sources)
    _mix(draft, sources, weights, *labels, roots=roots)
    if not is_known and len(sources) > 1:
        text = "tiercel takes equal parts until data.mix.N.weight is set: each file's number of rows / that of the"
        draft.note(f"{draft.launch.framework} puts the files end to end; {text} first", *labels)


def _counted(draft: RecipeDraft, path: str) -> int | None:
    """Return how many rows `path#N`, a .jsonl file or a .json list has, or None if it cannot be found or read."""
    if (count := split_count(path)[1]) is not None:
        return count
    file = draft.launch.file(path) if path.endswith((".jsonl", ".json")) else None
    if file is None:
        return None
    if file.suffix == ".json":
        try:
            rows = json.loads(file.read_text(encoding="utf-8-sig"))
        except ValueError:
            return None
        return len(rows) if isinstance(rows, list) else None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _mix(
    draft: RecipeDraft, sources: Sequence[str], weights: list[float], *labels: str, roots: Sequence[str] = ()
) -> None:
    if not sources:
        return
    draft.set("data.train", sources[0], *labels)
    first, *others = roots or [""] * len(sources)
    if first:
        draft.set("data.image_root", first, "image_folders")
    more = [
        {"path": path, "weight": weight, **({"image_root": root} if root else {})}
        for path, weight, root in zip(sources[1:], weights[1:], others, strict=True)
    ]
    if more:
        draft.set("data.mix", more, *labels)


def _held_out(launch: Launch, draft: RecipeDraft) -> None:
    for name, read in (("val_dataset", _swift_source), ("eval_dataset", _described)):
        if launch.framework != "TRL" and (words := _listed_words(launch, name)):
            draft.set("data.eval", read(launch, draft, words[0], name), name)
            if len(words) > 1:
                draft.note("data.eval is one file; put the rows into one", name)
            return
    for name in ("split_dataset_ratio", "val_split_ratio", "val_size", "train_test_split"):
        share = launch.real(name) if name in launch.flags else None
        if share:
            draft.set("data.eval", {"count": int(share)} if share >= 1 else {"fraction": share}, name)
        elif share == 0:
            draft.note("no rows are held out, which is tiercel's default as well", name, is_change=False)
    asked = (launch.text("eval_strategy", "evaluation_strategy") or "no").lower()
    is_named = not launch.is_code or "dataset_test_split" in launch.flags  # a script names the rows itself
    if launch.framework == "TRL" and asked != "no" and launch.text("dataset_name") and is_named:
        split = launch.text("dataset_test_split") or "test"
        path = f"hf:{launch.text('dataset_name')}{_subset(launch)}:{split}"
        draft.set("data.eval", path, "eval_strategy", "dataset_test_split", "dataset_config")


def _subset(launch: Launch) -> str:
    """Return the configuration of a hub's data set as a part of its name."""
    return f"/{launch.text('dataset_config')}" if launch.text("dataset_config") else ""


def _shuffle(launch: Launch, draft: RecipeDraft) -> None:
    """Set whether rows are shuffled. ms-swift shuffles them once and then in each epoch, so one of its flags alone does
    not keep the order of the file. In GRPO the first alone decides, in GKD neither."""
    flags = ("dataset_shuffle", "train_dataloader_shuffle")
    is_by_table = launch.kind in ("grpo", "distill")
    if launch.framework == "ms-swift" and not is_by_table and {*flags} & {*launch.flags}:
        by_flag = [launch.is_true(flag) for flag in flags]
        still = "" if all(by_flag) or not any(by_flag) else f"ms-swift shuffles by --{flags[by_flag.index(True)]}; "
        remark = f"{still}order is a function of train.seed"
        draft.set("data.shuffle", any(by_flag), *flags, remark=remark)


def _system(launch: Launch, draft: RecipeDraft) -> None:
    if launch.framework != "ms-swift" or not (text := launch.text("system")):
        return
    if (written := launch.text_in(text)) is not None:
        draft.set("data.system", written, "system", remark="its text")
    elif re.fullmatch(r"\S+\.(txt|md|json|jinja)", text):
        draft.note("the file is not on this machine; put its text into data.system", "system")
    else:
        draft.set("data.system", text, "system")


def _thinking(launch: Launch, draft: RecipeDraft) -> None:
    """Set the template's variable `enable_thinking`; true is the default of the templates that have it."""
    if launch.text("enable_thinking") is None or "data.template_arguments" in draft.values:
        return
    if launch.is_true("enable_thinking"):
        draft.note("the default of templates that have it", "enable_thinking", is_change=False)
    else:
        draft.set("data.template_arguments", {"enable_thinking": False}, "enable_thinking")


def _limits(launch: Launch, draft: RecipeDraft) -> None:
    flag = "cutoff_len" if launch.framework == "LLaMA-Factory" else "max_length"
    if launch.kind == "sft" and "max_seq_length" in launch.flags and flag not in launch.flags:
        flag = "max_seq_length"  # Unsloth's, and TRL's until 2025
    limit = launch.number(flag) if launch.script not in ("sft_vlm.py", "sft_vlm_gemma3.py") else None
    if limit is not None:
        draft.put("data.max_prompt_tokens", limit, flag)
        cuts = launch.text("truncation_strategy") or ("left" if launch.kind == "grpo" else "delete")
        is_cut = launch.framework in ("TRL", "LLaMA-Factory") or cuts != "delete"
        cut = f"{launch.framework} cuts a longer row; tiercel rejects it whole"
        text = cut if is_cut else "a longer row is left out, as in tiercel"
        draft.note(text, flag, "truncation_strategy", otherwise=f"more than {limit} tokens", is_change=is_cut)
    elif "data.max_prompt_tokens" not in draft.values:
        text = f"{launch.framework} has no limit; tiercel rejects rows of more than 4096: data.max_prompt_tokens"
        draft.note(text, subject="length of prompts")


def _turns(launch: Launch, draft: RecipeDraft) -> None:
    if launch.kind == "sft" and (scale := launch.text("loss_scale")):
        if scale in ("last_round", "default"):
            draft.set("data.train_turns", "last" if scale == "last_round" else "all", "loss_scale")
        else:
            draft.note("weights of tokens are 0 or 1: data.train_turns all or last", "loss_scale")
    if launch.framework == "TRL" and launch.kind == "sft":
        names = ("assistant_only_loss", "completion_only_loss")
        asked = any(map(launch.is_true, names))
        text = "assistant turns are learnt, as in tiercel"
        text = text if asked else "TRL learns whole conversations, tiercel their assistant turns"
        draft.note(text, *names, otherwise="which tokens are learnt", is_change=not asked)
