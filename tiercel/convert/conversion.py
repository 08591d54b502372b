"""Convert a command to a draft of a recipe: first the keys that take a flag's value unchanged, then the peer's defaults
of such keys, then the values that several flags decide together, and finally a note for everything else."""

import os
from collections.abc import Iterator
from itertools import takewhile
from os.path import dirname, realpath, sep
from pathlib import Path
from posixpath import normpath

from tiercel.config.suggestions import nearest_key
from tiercel.config.synonyms import word_synonyms
from tiercel.convert.draft import RecipeDraft, defaults_by_rows, set_by_rows
from tiercel.convert.fitting import drop_unused, fit
from tiercel.convert.hydra import refusals_of_overrides, set_hydra, set_hydra_rewards, set_hydra_rows
from tiercel.convert.launches import METHOD_FLAGS, Launch
from tiercel.convert.manual_steps import set_resumed, tell_packages
from tiercel.convert.preferences import LOSS_FLAGS, pair_loss, set_preferences, token_loss
from tiercel.convert.rewards import set_rewards
from tiercel.convert.rows import set_rows
from tiercel.convert.sampling import set_sampling
from tiercel.convert.sizes import set_lengths, set_pack, set_sizes
from tiercel.convert.table import OVERRIDING
from tiercel.convert.tuning import TUNERS, set_tuning, tuner_of
from tiercel.convert.values import split_count
from tiercel.message_text import counted
from tiercel.reliability.redaction import redact


def refusals(launch: Launch) -> list[str]:
    """Return a line for each flag that asks for a method which this version does not have."""
    lines = []
    for name, words in launch.flags.items():
        row = launch.row_of(f"--{name}")
        is_off = words[:1] and words[0].lower() in ("false", "none", "0", "", *(row.default if row else ()))
        if row is not None and row.treatment == "refused" and not is_off:
            lines.append(f"{launch.given[f'--{name}']}: {row.told()}")
    loss = launch.text("loss_type") if launch.kind == "grpo" and launch.method != "rloo" else None
    if loss is not None and word_synonyms()["algorithm.loss"].get(loss.lower(), loss) is None:
        lines.append(f"--loss_type {loss} is not a method of this version; nearest: algorithm.loss: grpo")
    if launch.framework in OVERRIDING:
        return lines + refusals_of_overrides(launch)
    if launch.kind == "dpo" and pair_loss(launch) is None:
        named = [launch.given[f"--{flag}"] for flag in LOSS_FLAGS if flag in launch.flags]
        lines.append(f"{' '.join(named)} is not a method of this version; nearest: dpo.loss: sigmoid")
    if launch.framework == "TRL" and launch.kind == "sft" and token_loss(launch) is None:
        lines.append(f"--loss_type {launch.text('loss_type')} is not a method of this version; nearest: sft.loss: nll")
    if launch.kind == "distill" and not any(name.startswith("teacher_model") for name in launch.flags):
        lines.append("a student that teaches itself is not a method of this version; nearest: --teacher_model")
    if (tuner := tuner_of(launch)) not in ("lora", "lora_llm", "full"):
        given = next(name for name in TUNERS if name in launch.flags)
        lines.append(f"--{given} {tuner} is not a method of this version; nearest: the section lora")
    return lines


def set_image_root(launch: Launch, draft: RecipeDraft) -> None:
    """Set the directory in which relative paths of images start, if it is not that of the rows. In ms-swift it is
    the working directory, and then ROOT_IMAGE_DIR; in LLaMA-Factory it is that of all data sets."""
    if launch.framework == "LLaMA-Factory" and "data.image_root" not in draft.values:
        folder = launch.text("dataset_dir") or "data"
        if any(dirname(realpath(path)).startswith(realpath(folder) + sep) for path in _files(draft)):
            remark = "LLaMA-Factory starts relative paths of images there, also those of files in folders inside"
            draft.set("data.image_root", folder, remark=remark)
    if launch.framework != "ms-swift":
        return
    if root := launch.environment.get("ROOT_IMAGE_DIR"):
        draft.set("data.image_root", root, "ROOT_IMAGE_DIR")
        text = "ms-swift searches the working directory first; tiercel searches data.image_root alone"
        draft.note(text, "ROOT_IMAGE_DIR")
    elif any(realpath(dirname(path)) != os.getcwd() for path in _files(draft)):
        draft.set("data.image_root", ".", remark="ms-swift starts relative paths of images in the working directory")


def _files(draft: RecipeDraft) -> Iterator[str]:
    """Name the files of rows that the recipe has."""
    more = [entry["path"] for entry in draft.values.get("data.mix", [])]
    for name in (draft.values.get("data.train"), *more, draft.values.get("data.eval")):
        if isinstance(name, str) and not name.startswith("hf:"):
            found = draft.launch.file(split_count(name)[0])
            yield name if found is None else str(found)


_DEVICES = Path("/dev")
_LEFT_OUT = ("...", "\u2026")

# Each step may use the values that the steps before it have set.
STEPS = (
    set_resumed, set_sizes, set_sampling, set_preferences, set_tuning, drop_unused, fit, set_rows,
    set_image_root, set_rewards, set_lengths, set_pack, tell_packages,
)  # fmt: skip
OVERRIDE_STEPS = (
    set_hydra, drop_unused, fit, set_hydra_rows, set_image_root, set_hydra_rewards, set_pack, tell_packages,
)  # fmt: skip


def draft_of(launch: Launch) -> RecipeDraft:
    """Make the recipe that does what the command does. Raises ValueError if a value should be a number but is not, or
    if words are left out of the command."""
    if any(word in _LEFT_OUT for words in (launch.strays, *launch.flags.values()) for word in words):
        raise ValueError("`...` stands for words that were left out; give the whole command")
    draft = RecipeDraft(launch=launch, given=launch.given)
    set_by_rows(draft)
    defaults_by_rows(draft)
    steps = OVERRIDE_STEPS if launch.framework in OVERRIDING else STEPS
    for step in (*steps, _output, _processes, _words):
        step(launch, draft)
    draft.account()
    return draft


def _output(launch: Launch, draft: RecipeDraft) -> None:
    """Set a directory that does not contain what only the shell knows: the end of the given path, or else its
    beginning."""
    given = str(draft.values.get("output", ""))
    if not set(given) & set("$`"):
        return
    parts = given.split("/")
    end = [*takewhile(_is_plain, reversed(parts))][::-1]
    beginning = [*takewhile(_is_plain, parts), "imported"]
    found = normpath("/".join(end))
    if not end or found.startswith((".", "/")):
        found = "/".join(beginning) if len(beginning) > 1 else "runs/imported"
    origin = draft.origins["output"]
    draft.set("output", found, *origin.labels, remark="without what only the shell knows")


def _is_plain(part: str) -> bool:
    return not set(part) & set("$(){}\"'`&|; ")


def _processes(launch: Launch, draft: RecipeDraft) -> None:
    unknown = launch.unknown_process_labels
    text = "only the machine knows this number: optim.prompts_per_step is that of 1 process; give tiercel --nproc"
    draft.note(text, *unknown)
    if launch.counts_gpus and not launch.process_labels and launch.gpus is None:
        seen = len(list(_DEVICES.glob("nvidia[0-9]*")))
        gpus = f"this machine has {counted(seen, 'GPU')}" if seen else "this machine has no GPU"
        text = f"starts a process for each GPU that it sees, and {gpus}; optim.prompts_per_step is that of 1 process"
        text = f"{text}: multiply it by {seen}" if seen > 1 else f"{text}, for N GPUs write N times as much"
        draft.note(text, subject=launch.starter, is_change=seen != 1)
    found = counted(launch.processes, "process", "processes")
    command = f"tiercel {launch.kind} RECIPE --nproc {launch.processes}"
    known = [label for label in launch.process_labels if label not in unknown]
    draft.note(f"{found} in all: {command}", *known, is_change=False)
    if launch.accelerate is not None and launch.accelerate.processes and "launcher --config_file" in draft.given:
        draft.note(f"the file was read, {found}: {command}", "launcher --config_file", is_change=False)


def _words(launch: Launch, draft: RecipeDraft) -> None:
    """Add notes on words that belong to no flag, flags that are given twice, and variables that nothing gets."""
    if named := METHOD_FLAGS.get(launch.framework):
        draft.note(f"tiercel {launch.kind} is the method", named[0], is_change=False)
    is_found = launch.file(launch.text("config") or "") is not None
    read = "its flags were read, before those of the command"
    lost = "the file is not on this machine; its flags are lost"
    draft.note(read if is_found else lost, "config", is_change=not is_found)
    if launch.unexported:
        names = launch.unexported
        verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
        text = f"{verb} set without export, so the command gets {them} only if whoever starts the script exports {them}"
        draft.note(f"{text}; to be sure, write export {' '.join(names)}", subject=", ".join(names))
    for earlier in launch.earlier:
        name = earlier.partition(" ")[0]
        shown = name if draft.is_secret(name) else redact(earlier)
        draft.note("is given again later, which counts", subject=shown, is_change=False)
    if launch.strays:
        near = nearest_key(launch.strays[0]).key
        draft.note(f"belongs to no flag{f'; nearest is {near}' if near else ''}", subject=" ".join(launch.strays))
