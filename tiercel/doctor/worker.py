"""The child of the doctor: it imports a package, tries a device step by step, or is one of two ranks that try the
collectives of a run. Whatever it does may die, hang or print anything; sandbox/process.py runs it."""

import functools
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tiercel.rewards.runtime.worker import Reply, serve

if TYPE_CHECKING:
    from torch import Tensor

IMPORT, GPUS = "import", "gpus"
RANKS = 2
WRONG, HANG = "wrong", "hang"  # the name of a signal is a fault as well
FOR_EVER = 86400.0  # seconds

# Rows, inner dimension and columns of the products. Those of the second line have killed processes by SIGFPE on GPUs:
# https://github.com/PaddlePaddle/Paddle/issues/66921 https://github.com/pytorch/pytorch/issues/133548
# https://github.com/pytorch/pytorch/issues/152017
SHAPE = (96, 160, 128)
DEADLY_SHAPES = ((8, 1024, 4096), (2, 1024, 18432), (64, 14688, 1536))
HEADS, TOKENS, WIDTH = 4, 128, 64


def run(descriptor: int, work: None, file_mb: float) -> None:
    """Do what each request names, and reply with the result."""
    tasks: Mapping[str, Callable[..., Any]] = {
        "import": import_package,
        "step": try_step,
        "collectives": try_collectives,
    }

    def handle(request: Mapping[str, Any], reply: Reply) -> None:
        reply(result=tasks[request["task"]](*request["arguments"]))

    serve(descriptor, lambda: handle, file_mb)


def import_package(name: str) -> None:
    """Import "module" or "module:attribute"."""
    module, _, attribute = name.partition(":")
    imported = import_module(module)
    if attribute:
        getattr(imported, attribute)


def try_step(device: str, step: str, fault: str | None) -> Any:
    """Import torch, describe the GPUs, or try a dtype on a device. `fault` is what goes wrong, for tests."""
    if fault == HANG:
        time.sleep(FOR_EVER)
    elif fault is not None and fault != WRONG:
        signal.raise_signal(signal.Signals[fault])
    import torch

    if step == IMPORT:
        return torch.__version__
    return gpu_facts() if step == GPUS else relative_errors(device, step, wrong_product if fault else torch.matmul)


def relative_errors(device: str, dtype_name: str, product: Callable[..., "Tensor"]) -> dict[str, float]:
    """Return the largest relative error (norm of the difference over the norm) of each operation's result and gradients
    against float64 on the CPU; both start from inputs that are rounded to the dtype. On GPUs the shapes that are known
    to kill processes are tried as well, forward only, against float64 on the device: they are too large for the CPU."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    dtype, generator = getattr(torch, dtype_name), torch.Generator().manual_seed(0)

    def random(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, inner, columns = SHAPE
    inputs = [random(rows, inner), random(inner, columns), random(rows, columns)]
    products = [_relative_error(product, torch.matmul, inputs, device)]
    for rows, inner, columns in DEADLY_SHAPES if device == "cuda" else ():
        seeded = torch.Generator(device).manual_seed(0)
        shapes = ((rows, inner), (inner, columns))
        left, right = (torch.randn(shape, generator=seeded, device=device).to(dtype) for shape in shapes)
        expected = left.double() @ right.double()
        products.append(float((product(left, right).double() - expected).norm() / expected.norm()))
    attention = functools.partial(scaled_dot_product_attention, is_causal=True)
    inputs = [random(1, HEADS, TOKENS, WIDTH) for _ in range(4)]
    largest = float(torch.tensor(products).max())  # NaN if one is
    return {"matrix product": largest, "attention": _relative_error(attention, attention, inputs, device)}


def wrong_product(left: "Tensor", right: "Tensor") -> "Tensor":
    """Return a wrong product, as a faulty kernel might; for tests."""
    return 1.5 * (left @ right)


def _relative_error(
    operation: Callable[..., "Tensor"], exact: Callable[..., "Tensor"], inputs: Sequence["Tensor"], device: str
) -> float:
    """Return the largest relative error of a result and its gradients. The last of `inputs` is the gradient of the
    result."""
    import torch

    found = _result_and_gradients(operation, [each.to(device) for each in inputs])
    expected = _result_and_gradients(exact, [each.double() for each in inputs])
    errors = [(one.cpu().double() - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN if one is


def _result_and_gradients(operation: Callable[..., "Tensor"], inputs: Sequence["Tensor"]) -> list["Tensor"]:
    import torch

    *leaves, gradient = [each.detach().requires_grad_() for each in inputs]
    result = operation(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient.detach())]


def gpu_facts() -> dict[str, Any]:
    """Return as JSON: what torch was built for (None: only the CPU), why it sees no GPU if it says so, the CUDA
    version of the driver (12040 for 12.4, 0 if unknown), the architectures of this build, and each GPU."""
    import torch

    from tiercel.devices import driver_version

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_cuda = torch.version.cuda is not None
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return {
        "built_for": torch.version.cuda or torch.version.hip,
        "is_cuda": is_cuda,
        "complaint": " ".join(str(each.message) for each in caught),
        "driver": driver_version() if is_cuda and count else 0,
        "architectures": torch.cuda.get_arch_list() if count else [],
        "gpus": [
            {"name": each.name, "memory": each.total_memory, "capability": [each.major, each.minor]}
            for each in properties
        ],
    }


def try_collectives(backend: str, rank: int, port: int, seconds: float) -> str | None:
    """Sum a tensor and gather objects with the other rank; return what is wrong with the results. `port` is of rank 0
    on the loopback interface; `seconds` pass until a collective fails.

    torch.distributed pickles the gathered objects, between two processes of this user that the doctor itself started.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    address, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=RANKS, timeout=timeout)
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    gathered: list[int | None] = [None] * RANKS
    dist.all_gather_object(gathered, rank)
    if not bool((total == sum(range(1, RANKS + 1))).all()) or gathered != list(range(RANKS)):
        return f"wrong result: the sum is {total[0].item():g}, the gathered values are {gathered}"
    dist.barrier()
    return None
