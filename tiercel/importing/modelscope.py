"""What is left to do where a model or rows come from ModelScope."""

from importlib.util import find_spec
from pathlib import Path

from tiercel.importing.draft import RecipeDraft


def set_package_needed(draft: RecipeDraft) -> None:
    """Tell that the package is needed where a model is downloaded from ModelScope."""
    for section in ("model", "teacher"):
        path = str(draft.values.get(f"{section}.path", ""))
        if draft.values.get(f"{section}.hub") == "modelscope" and not Path(path).is_dir() and not _is_installed():
            draft.left.append(f"{section}.hub: modelscope needs its package: pip install modelscope")


def rows_of_modelscope(draft: RecipeDraft, id: str, subject: str) -> None:
    """Tell how to get rows that Hugging Face's hub may not have. `subject`: the flag and its value."""
    name = id.rpartition("/")[2]
    steps = f"modelscope download --dataset {id} --local_dir {name}; then write hf:./{name}"
    steps = steps if _is_installed() else f"pip install modelscope; {steps}"
    draft.left.append(f"{subject}: where Hugging Face does not have these rows: {steps}")


def _is_installed() -> bool:
    return find_spec("modelscope") is not None
