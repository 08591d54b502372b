"""Faults that are planted into a run on a null GPU. Each is seen by a check of tests/nullgpu/checks.py, or ends the
run."""

from collections.abc import Callable
from typing import Any

import torch

from tiercel import devices
from tiercel.packing import forward
from tiercel.rollout.local.cuda_graphs import FixedDecoder


def _around(change: Callable[[torch.Tensor], Any], *, captured: bool) -> None:
    """Do something to the token ids of each step: in the captured one, or before it is replayed."""
    name = "_eager_step" if captured else "step"
    step = getattr(FixedDecoder, name)

    def changed(self: FixedDecoder, token_ids_R: torch.Tensor) -> torch.Tensor:
        if not captured or torch.cuda.is_current_stream_capturing():
            change(token_ids_R)
        return step(self, token_ids_R)

    setattr(FixedDecoder, name, changed)


def wait_in_the_capture() -> None:
    """As `.item()` in a layer would."""
    _around(lambda token_ids_R: token_ids_R.sum().item(), captured=True)


def wait_in_the_decode_loop() -> None:
    _around(lambda token_ids_R: token_ids_R.sum().item(), captured=False)


def allocation_in_the_capture() -> None:
    _around(lambda token_ids_R: torch.empty(2**28, device=token_ids_R.device), captured=True)


def pageable_copies() -> None:
    def from_pageable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    devices.moved = forward.moved = from_pageable


def tensors_of_two_devices() -> None:
    forward.moved = lambda tensor, device: tensor


PLANTED: dict[str, Callable[[], None]] = {
    "a wait in the capture": wait_in_the_capture,
    "a wait in the decode loop": wait_in_the_decode_loop,
    "an allocation in the capture": allocation_in_the_capture,
    "copies from pageable memory": pageable_copies,
    "tensors of two devices": tensors_of_two_devices,
}
