"""List what you still have to do by hand: packages, rows and models of ModelScope, a checkpoint of the peer."""

from importlib.util import find_spec
from pathlib import Path

from tiercel.config.engines import ENGINE_KINDS
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.config.tracker_packages import require_packages
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch
from tiercel.convert.tuning import tuner_of
from tiercel.errors import EnvironmentProblem


def rows_of_modelscope(draft: RecipeDraft, id: str, subject: str) -> None:
    """Add a line on how to get rows that Hugging Face's hub may not have. `subject` is the flag and its value."""
    name = id.rpartition("/")[2]
    steps = f"run modelscope download --dataset {id} --local_dir {name}, then use hf:./{name}"
    steps = steps if _is_installed() else f"run pip install modelscope; {steps}"
    draft.left.append(f"{subject}: if Hugging Face does not have these rows, {steps}")


def _is_installed() -> bool:
    return find_spec("modelscope") is not None


def tell_packages(launch: Launch, draft: RecipeDraft) -> None:
    """Add a line for each package to install, as `tiercel check` would ask for it."""
    values = draft.values
    for section in ("model", "teacher"):
        is_folder = Path(str(values.get(f"{section}.path", ""))).is_dir()
        if values.get(f"{section}.hub") == "modelscope" and not is_folder and not _is_installed():
            draft.left.append(f"{section}.hub: modelscope needs its package: pip install modelscope")
    strategy, engine = STRATEGY_KINDS.get(values.get("train.strategy", "")), values.get("rollout.engine", "local")
    needed = {
        "model.quantize": "bitsandbytes" if values.get("model.quantize") else None,
        "optim.name": "bitsandbytes" if values.get("optim.name", "adamw") != "adamw" else None,
        "train.strategy": strategy.package if strategy else None,
        "rollout.engine": ENGINE_KINDS[engine].package,
    }
    for key, package in needed.items():
        if package is not None and find_spec(package) is None:
            draft.left.append(f"{key}: needs the package {package}; pip install {package}")
    try:
        require_packages(values.get("trackers", []))
    except EnvironmentProblem as error:
        draft.left.append(str(error))


_FLAG = "resume_from_checkpoint"


def set_resumed(launch: Launch, draft: RecipeDraft) -> None:
    """Start from the adapter of the checkpoint that the command continues from; for whole weights, note what to
    write."""
    words = launch.flags.get(_FLAG, ())
    if not words or words[0].lower() in ("true", "false", "null", "none", ""):
        return
    lost = "its optimiser, its position in the rows and its step are not read, and the run begins at step 0"
    if tuner_of(launch) == "full":
        draft.note(f"is not a checkpoint of tiercel: {lost}; to use its weights, set model.path: {words[0]}", _FLAG)
        return
    if "lora.init" not in draft.values:
        draft.set("lora.init", words[0], _FLAG, remark="the adapter of that checkpoint")
    draft.note(f"is not a checkpoint of tiercel: {lost}; lora.init accepts only an adapter", _FLAG)
