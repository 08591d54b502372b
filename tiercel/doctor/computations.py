"""Computations that the child tries on a device: matrix products and attention; and torch's facts on the GPUs."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiercel.devices import driver_version

# Rows, inner dimension and columns of the products. Those of the second line have killed processes by SIGFPE on GPUs:
# https://github.com/PaddlePaddle/Paddle/issues/66921 https://github.com/pytorch/pytorch/issues/133548
# https://github.com/pytorch/pytorch/issues/152017
SHAPE = (96, 160, 128)
DEADLY_SHAPES = ((8, 1024, 4096), (2, 1024, 18432), (64, 14688, 1536))
HEADS, TOKENS, WIDTH = 4, 128, 64


def relative_errors(
    device: str, dtype_name: str, product: Callable[[Tensor, Tensor], Tensor] | None = None
) -> dict[str, float]:
    """Return the largest relative error (norm of the difference over the norm) of each operation's result and gradients
    against float64 on the CPU; both start from inputs that are rounded to the dtype. On GPUs the shapes that are known
    to kill processes are tried as well, forward only. `product` replaces torch.matmul."""
    dtype, product = getattr(torch, dtype_name), product or torch.matmul
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, inner, columns = SHAPE
    inputs = [random(rows, inner), random(inner, columns), random(rows, columns)]
    products = [_relative_error(product, torch.matmul, inputs, device)]
    if device == "cuda":
        products += [_forward_error(product, shape, dtype, device) for shape in DEADLY_SHAPES]
    attention = functools.partial(scaled_dot_product_attention, is_causal=True)
    inputs = [random(1, HEADS, TOKENS, WIDTH) for _ in range(4)]
    return {
        "matrix product": float(torch.tensor(products).max()),  # NaN where one is
        "attention": _relative_error(attention, attention, inputs, device),
    }


def wrong_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a wrong product, as a faulty kernel might; for tests."""
    return 1.5 * (left @ right)


def _relative_error(
    operation: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: Sequence[Tensor], device: str
) -> float:
    """Return the largest relative error of a result and its gradients. The last of `inputs` is the gradient of the
    result."""
    found = _result_and_gradients(operation, [each.to(device) for each in inputs])
    expected = _result_and_gradients(exact, [each.double() for each in inputs])
    errors = [(one.cpu().double() - other).norm() / other.norm() for one, other in zip(found, expected, strict=True)]
    return float(torch.stack(errors).max())  # NaN where one is


def _forward_error(
    product: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> float:
    """Return the relative error of a product against float64 on the same device: it is too large for the CPU."""
    rows, inner, columns = shape
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn((rows, inner), generator=generator, device=device).to(dtype)
    right = torch.randn((inner, columns), generator=generator, device=device).to(dtype)
    expected = left.double() @ right.double()
    return float((product(left, right).double() - expected).norm() / expected.norm())


def _result_and_gradients(operation: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    *leaves, gradient = [each.detach().requires_grad_() for each in inputs]
    result = operation(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, gradient.detach())]


def gpu_facts() -> dict[str, Any]:
    """Return as JSON: what torch was built for (None: only the CPU), why it sees no GPU where it says so, the CUDA
    version of the driver (12040 for 12.4, 0 where unknown), the architectures of this build, and each GPU."""
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
