"""A moving reference: a second adapter, which follows the policy's adapter at intervals."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiercel.errors import ModelError
from tiercel.models.policy import REFERENCE, Policy
from tiercel.models.weights.checkpoint_files import read_tensors

FILE = "reference.safetensors"


def sync_reference(policy: Policy, mix: float) -> None:
    """Set each matrix of the reference to (1 - mix) * reference + mix * policy.

    This is TR-DPO (Gorbatovski et al. 2024) with LoRA's matrices instead of whole weights. It is exact for a mix of 1,
    which is a copy. Below 1 the product of mixed matrices is not the mix of the products.
    """
    with torch.no_grad():
        for _, own, reference in _pairs(policy):
            reference.lerp_(own, mix) if mix < 1 else reference.copy_(own)


def save_reference(policy: Policy, directory: Path) -> None:
    """Write the reference's matrices into `directory`, but only if the reference is part of a checkpoint."""
    if policy.saves_reference:
        tensors = {name: reference.detach().cpu().contiguous() for name, _, reference in _pairs(policy)}
        save_file(tensors, directory / FILE)


def restore_reference(policy: Policy, directory: Path) -> None:
    """Read what `save_reference` wrote. Raises ModelError if the file is missing or has other layers."""
    if not policy.saves_reference:
        return
    tensors = read_tensors(directory / FILE)
    names = {name: reference for name, _, reference in _pairs(policy)}
    if set(tensors) != set(names):
        odd = sorted(set(tensors) ^ set(names))[0]
        raise ModelError(f"{directory / FILE}: the reference's layers differ from the policy's, such as {odd}")
    for name, tensor in tensors.items():
        names[name].data.copy_(tensor)


def _pairs(policy: Policy) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield, in the order of the names, each LoRA matrix: its name in the policy, its tensor in the policy, and its
    tensor in the reference."""
    named = dict(policy.model.named_parameters())
    for name in sorted(named):
        if ".lora_" in name and ".default." in name:
            yield name, named[name], named[name.replace(".default.", f".{REFERENCE}.")]
