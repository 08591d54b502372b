"""Choose the form of the policy pass from `learner.form`, the device and the model."""

import torch

from tiercel.errors import ModelError
from tiercel.learner.layout import PackItem

AUTO = {"cpu": "split", "cuda": "flex"}
CONTINUES_A_PREFIX = ("split", "flex")  # forms that can run completions after a separate pass of their prompt
COMPUTES_PARTS = ("flex", "dense")  # forms that ranks can compute together, each for its part of the tokens


def chosen_form(asked: str, device: torch.device, obstacle: str | None, *, in_parts: bool = False) -> str:
    """Choose the form to run. `obstacle`: why the model cannot share prompts (see `shared_prefix_obstacle`); `auto` is
    then `repeated`. `in_parts`: ranks compute a pack together. Raises ModelError for a form that this device or model
    cannot compute."""
    if in_parts and obstacle:
        raise ModelError(f"train.context_parallel: ranks cannot compute a row together, {obstacle}; remove it")
    if asked == "auto" and in_parts:
        return "flex" if device.type == "cuda" else "dense"
    if asked == "auto":
        return "repeated" if obstacle else AUTO.get(device.type, "dense")
    if asked != "repeated" and obstacle:
        raise ModelError(f"learner.form: {asked} runs a prompt once, but this model cannot: {obstacle}; use repeated")
    if asked == "split" and device.type != "cpu":
        raise ModelError(f"learner.form: split runs on CPU only, and the device is {device.type}; use flex")
    if asked == "flex" and device.type == "cpu":
        raise ModelError("learner.form: flex has no backward pass on CPU; use split")
    return asked


def packed_length(item: PackItem, form: str) -> int:
    """Count the tokens that a form computes for an item."""
    return item.repeated_length if form == "repeated" else item.shared_length
