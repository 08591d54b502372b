"""AdamW, the learning-rate schedule, clipping, and the optimiser's state as tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tiercel.config.schema import Optim
from tiercel.errors import RunError

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(parameters: Mapping[str, nn.Parameter], optim: Optim) -> torch.optim.AdamW:
    """Weight decay on matrices only; norms and biases keep their scale."""
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=True
    )


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The rate of the update that follows `step` finished steps."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    return optim.lr * (1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, fp32."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters.values() if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def clip_gradients(parameters: Mapping[str, nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.device))


def optimizer_tensors(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as `NAME.exp_avg` and so on, in the order of the names."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key].detach().cpu().contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in STATE_NAMES
    }


def restore_optimizer(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. Raises RunError where the names differ."""
    known = {f"{name}.{key}" for name in parameters for key in STATE_NAMES}
    if unknown := sorted(set(tensors) - known):
        raise RunError(f"optimizer.safetensors has state of unknown parameters, such as {unknown[0]}")
    for name, parameter in parameters.items():
        if f"{name}.step" in tensors:
            state = {key: tensors[f"{name}.{key}"].clone() for key in STATE_NAMES}
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
            }
