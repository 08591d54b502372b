"""The device that models run on, and the driver of the GPUs."""

import ctypes

import torch
from torch import Tensor


def training_device() -> torch.device:
    """Choose the GPU if there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # On Hopper and Blackwell, PyTorch prefers cuDNN's attention, which makes a plan for each new shape. That takes a
    # part of a second each time, and pictures of many sizes make many shapes. FlashAttention and the memory-efficient
    # kernel make no plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. The host does not wait for a GPU, as it might if the memory were not pinned or had
    gaps: PyTorch copies a tensor with gaps to memory that is not pinned first."""
    is_upload = device.type == "cuda" and tensor.device.type == "cpu"
    return (tensor.contiguous().pin_memory() if is_upload else tensor).to(device, non_blocking=True)


def is_reproducible(device: torch.device) -> bool:
    """Return whether a run that is killed and resumed has to compute the same bytes: on a CPU, and with
    `train.deterministic`."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def driver_version() -> int:
    """Return the CUDA version that the driver supports, such as 13000 for 13.0, or 0 if it is unknown."""
    found = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return found.value
