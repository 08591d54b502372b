"""Export of what a run has trained as a Hugging Face directory that vLLM and transformers can load."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from tiercel.config import Recipe
from tiercel.config.schema import Quantization
from tiercel.errors import RunError
from tiercel.inference_and_export.weights import NEWEST, CheckpointChoice, Trained, trained_weights
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.quantized import is_quantized, quantizable, rounded, rounding_error
from tiercel.models.layers.value_head import NAME as VALUE_HEAD
from tiercel.models.policy import WHOLE_FILE, Policy, load_for_inference
from tiercel.models.weights.loading import DTYPES
from tiercel.models.weights.saving import save_model
from tiercel.writing import let_others_read, writing

LEAST_KEPT = 0.9  # of an adapter's change, by rounding; less is told


def export(recipe: Recipe, run: Path, target: Path, *, merge: bool, choice: CheckpointChoice = NEWEST) -> Path:
    """Write the merged model, or only the adapter, and return the directory. Raises RunError if `target` is not empty,
    or if the adapter alone would not be the policy."""
    with _whole(target) as folder:  # before the weights are loaded
        trained = trained_weights(run, recipe, choice)
        if merge:
            family, weights = _merged(recipe, trained, target)
            with writing(target):
                save_model(family, weights, folder)
        else:
            _copy_adapter(run, trained.adapter, folder, target)
            if recipe.lora is not None and recipe.lora.start is not None:
                print(
                    f"the adapter belongs to {recipe.model.path} in {recipe.model.quantize}; load the model that way, "
                    "or use --merge"
                )
        with writing(target):
            let_others_read(folder)
    return target


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield the directory to write into. If `target` is not there, it becomes `target` at the end, so that an export
    that fails or is interrupted leaves nothing that looks like one."""
    with writing(target):
        if target.exists() and not target.is_dir():
            raise RunError(f"--output: {target} is a file; name a directory")
        if target.is_dir() and any(target.iterdir()):
            raise RunError(f"{target} is not empty; remove it or name another --output")
    if target.is_dir():
        yield target
        return
    folder = target.with_name(f".{target.name}.part")
    with writing(target):
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
        folder.mkdir(parents=True)
    try:
        yield folder
        with writing(target):
            folder.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _copy_adapter(run: Path, adapter: Path | None, folder: Path, target: Path) -> None:
    if adapter is None:
        raise RunError(f"{run} is full fine-tuning and has no adapter; use --merge")
    if (adapter / WHOLE_FILE).is_file():
        raise RunError(
            f"{run} trained other weights beside its adapter, so the adapter alone is not its policy; use --merge"
        )
    with writing(target):
        shutil.copytree(adapter, folder, dirs_exist_ok=True)


def _merged(recipe: Recipe, trained: Trained, target: Path) -> tuple[Family, HuggingFaceModel]:
    """Load what a run has trained, with its adapter merged into the model, in the recipe's dtype."""
    policy = load_for_inference(
        recipe.with_values({"model.path": trained.model, "model.quantize": None}), torch.device("cpu"), trained.adapter
    )
    if is_quantized(policy.model):
        raise RunError(
            f"{trained.model} is quantised itself, so there is nothing exact to merge into; export --adapter"
        )
    if (quantize := recipe.model.quantize) is not None:
        assert recipe.lora is not None  # without it nothing is quantised
        print(_merged_into(policy, quantize, target, starts_at_rounding=recipe.lora.start is not None))
    dtype = recipe.model.dtype
    if policy.peft is not None and (kept := _kept_by_rounding(policy.peft, DTYPES[dtype])) < LEAST_KEPT:
        print(
            f"rounded to {dtype}, the merged weights keep {kept:.0%} of what the adapter changes, because its changes "
            "are smaller than the steps between these numbers; serve the adapter itself (export --adapter), or score "
            "what was merged"
        )
    weights = policy.model if policy.peft is None else policy.peft.merge_and_unload(safe_merge=True)
    for name, parameter in weights.named_parameters():
        if not name.startswith(f"{VALUE_HEAD}."):  # a reward model's head is in float32 wherever it is saved
            parameter.data = parameter.data.to(DTYPES[recipe.model.dtype])
    return policy.family, weights


def _merged_into(policy: Policy, kind: Quantization, target: Path, *, starts_at_rounding: bool) -> str:
    """Return a line that says which weights the adapter of a quantised run is merged into. An adapter that started from
    the rounding error belongs to the rounded weights, so the policy gets these."""
    if starts_at_rounding:
        for name in quantizable(policy.family, policy.model, kind):
            weight = policy.model.get_parameter(f"{name}.weight")
            weight.data = rounded(weight.detach(), kind).to(weight.dtype)
        return f"merged into the {kind} weights that the adapter was trained on, since it started at what they lack"
    error = rounding_error(policy.family, policy.model, kind)
    return (
        f"merged into the checkpoint's own weights; the {kind} ones that the adapter was trained on are {error:.2%} of "
        f"their norm away. `tiercel eval` of the recipe with model.path={target}, lora=null and model.quantize=null "
        "scores what was merged"
    )


@torch.no_grad()
def _kept_by_rounding(model: nn.Module, dtype: torch.dtype) -> float:
    """Return the share of what an adapter changes that is left in the merged weights when they are rounded to `dtype`:
    weights whose change is less than half of the distance to the next number stay as they were."""
    kept = changed = 0.0
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or layer.use_dora.get("default"):
            continue
        weight, change = base.weight.float(), layer.get_delta_weight("default").float()
        left = (weight + change).to(dtype).float() - weight.to(dtype).float()
        kept, changed = kept + float((left * change).sum()), changed + float(change.square().sum())
    return kept / changed if changed else 1.0
