"""`tiercel export`: what a run trained, as a Hugging Face directory that vLLM and transformers load."""

import shutil
from pathlib import Path

import torch

from tiercel.cli.evaluate import trained_weights
from tiercel.errors import RunError
from tiercel.models.loading import DTYPES
from tiercel.models.policy import WHOLE_FILE, load_for_inference
from tiercel.models.saving import copy_tokenizer_files
from tiercel.runs.directory import load_run_recipe


def export(run: Path, *, merge: bool, output: Path | None) -> Path:
    """The merged model, or the adapter alone. Raises RunError where the output exists already."""
    recipe = load_run_recipe(run)
    target = output or run / ("model" if merge else "adapter")
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{target} is not empty; remove it or name another --output")
    model, adapter = trained_weights(run, recipe)
    if not merge:
        if adapter is None:
            raise RunError(f"{run} is full fine-tuning and has no adapter; use --merge")
        if (adapter / WHOLE_FILE).is_file():
            raise RunError(
                f"{run} trained weights whole beside its adapter, which alone is not its policy; use --merge"
            )
        shutil.copytree(adapter, target, dirs_exist_ok=True)
        return target
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    policy = load_for_inference(chosen, torch.device("cpu"), adapter)
    weights = policy.model if policy.peft is None else policy.peft.merge_and_unload(safe_merge=True)
    weights.to(DTYPES[recipe.model.dtype]).save_pretrained(target)
    copy_tokenizer_files(Path(policy.family.checkpoint.path), target)
    return target
