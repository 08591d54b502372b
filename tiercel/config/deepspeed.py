"""Make DeepSpeed's config from the recipe, and check the user's own config against it before any process starts."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiercel.config.schema import BaseRecipe, Optim
from tiercel.config_base import Keys, Problem

Tree = dict[str, Any]

DECIDED_HERE = {
    "train_batch_size": "optim.prompts_per_step",
    "train_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "learner.max_tokens_per_microbatch",
    "gradient_clipping": "optim.max_grad_norm",
    "scheduler": "optim.schedule",
    "fp16": "model.dtype",
    "bf16": "model.dtype",
}


def zero_config(recipe: BaseRecipe, *, on_cpu: bool) -> Tree:
    """Return what `deepspeed.initialize` takes: the recipe's settings, with those that the user's file adds."""
    own = made_config(recipe, on_cpu=on_cpu)
    file = recipe.train.deepspeed.config
    return own if file is None else _without_auto(_merged(own, _read(Path(file))))


def deepspeed_problems(recipe: BaseRecipe) -> list[Problem]:
    """List the settings of the user's file that contradict the recipe or that ZeRO does not support here."""
    file = recipe.train.deepspeed.config
    if file is None:
        return []
    try:
        found = [f"{file}: {text}" for text in _contradictions(_read(Path(file)), recipe)]
    except (OSError, ValueError) as error:
        found = [f"{file} cannot be read as a JSON object: {error}"]
    return [Keys("train.deepspeed.config").problem(text) for text in found]


def made_config(recipe: BaseRecipe, *, on_cpu: bool) -> Tree:
    """Make DeepSpeed's config from the recipe alone."""
    zero, optim = recipe.train.deepspeed, recipe.optim
    offload = {"device": "cpu", "pin_memory": not on_cpu}
    section: Tree = {
        "stage": zero.stage,
        "overlap_comm": not on_cpu,
        "contiguous_gradients": True,
        "reduce_scatter": not on_cpu,
    }
    if zero.stage == 3:
        # Adapters are small: with DeepSpeed's own threshold of 1e5, most of what is trained would be kept whole.
        section["stage3_param_persistence_threshold"] = 0
    if zero.offload_parameters:
        section["offload_param"] = offload
    if zero.offload_optimizer:
        section["offload_optimizer"] = offload
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # their number changes from step to step; the boundaries are set by hand
        "gradient_clipping": optim.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {**_adam(optim), "torch_adam": True}},
        "zero_optimization": section,
    }


def _adam(optim: Optim) -> Tree:
    """Return the recipe's settings of AdamW, under DeepSpeed's names."""
    return {"lr": optim.lr, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}


def _read(file: Path) -> Tree:
    tree = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(tree, dict):
        raise ValueError(f"it is {type(tree).__name__}")
    return tree


def _contradictions(theirs: Mapping[str, Any], recipe: BaseRecipe) -> Iterator[str]:
    """Yield a line for each value of the user's file that contradicts the recipe or that ZeRO does not support here."""
    zero, optim = recipe.train.deepspeed, recipe.optim
    for key, ours in DECIDED_HERE.items():
        value = theirs.get(key, "auto")
        is_same = key == "gradient_clipping" and value == optim.max_grad_norm
        is_off = isinstance(value, dict) and value.get("enabled") in (False, "auto")
        if value != "auto" and not is_same and not is_off:
            yield f"{key} is {json.dumps(value)}, but {ours} of the recipe decides it; remove it, or use auto"
    section = theirs.get("zero_optimization", {})
    stage = section.get("stage", zero.stage)
    if stage not in ("auto", zero.stage):
        yield f"zero_optimization.stage is {stage}, but train.deepspeed.stage is {zero.stage}; make them equal"
    for key, is_asked, name in (
        ("offload_param", zero.offload_parameters, "offload_parameters"),
        ("offload_optimizer", zero.offload_optimizer, "offload_optimizer"),
    ):
        device = section.get(key, {}).get("device", "none")
        if key in section and device not in ("auto", "cpu" if is_asked else "none"):
            yield (
                f"zero_optimization.{key}.device is {device}, but train.deepspeed.{name} is {str(is_asked).lower()}; "
                "make them agree (cpu or none)"
            )
    yield from _optimizer_problems(theirs.get("optimizer", {}), recipe)


def _optimizer_problems(theirs: Mapping[str, Any], recipe: BaseRecipe) -> Iterator[str]:
    kind = theirs.get("type", "AdamW")
    if kind not in ("auto", "AdamW"):
        yield (
            f"optimizer.type is {kind}, but ZeRO stage {recipe.train.deepspeed.stage} needs AdamW here: "
            "checkpoints store its two moments, and 1-bit and other compressed optimisers do not accept "
            "partitioned gradients; use AdamW, or remove it"
        )
    ours = _adam(recipe.optim)
    for key, value in theirs.get("params", {}).items():
        if key in ours and value not in ("auto", ours[key]):
            yield f"optimizer.params.{key} is {value}, but optim.{key} is {ours[key]}; remove it, or use auto"


def _merged(ours: Tree, theirs: Mapping[str, Any]) -> Tree:
    """Merge their settings into ours, section by section; "auto" keeps ours."""
    merged = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, Mapping):
            mine = merged.get(key)
            merged[key] = _merged(mine if isinstance(mine, dict) else {}, value)
        elif value != "auto" or key not in merged:
            merged[key] = value
    return merged


def _without_auto(tree: Tree) -> Tree:
    """Leave out each "auto" that the recipe does not set; DeepSpeed decides these."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value != "auto"
    }
