"""Whether an error means that memory ran out."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class of its own for devices only; on a CPU it names its allocator."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
