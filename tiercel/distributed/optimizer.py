"""Build AdamW, clip gradients, and save and restore the optimiser's state as tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiercel.config.schema import Optim
from tiercel.errors import ModelError, RunError
from tiercel.models.policy import Policy, base_name

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(policy: Policy, optim: Optim) -> torch.optim.AdamW:
    """Build AdamW over all trained parameters: in one kernel on a GPU, otherwise by operations on all of them together,
    which a CPU computes to the same bytes as ever."""
    groups = parameter_groups(policy, optim)
    is_fused = policy.device.type == "cuda"
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=is_fused, foreach=not is_fused
    )


def parameter_groups(policy: Policy, optim: Optim) -> list[dict[str, Any]]:
    """Group the parameters for the optimiser. Only matrices have weight decay, not norms and biases. Sharded parameters
    have their own groups, because no operation takes them together with whole ones. `share`: the group's learning rate
    divided by optim.lr. Raises ModelError where a part has a learning rate but no trained parameter."""
    rates = {part: rate for part, rate in optim.part_lr if rate is not None}
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    trained_parts = set()
    for name, parameter in policy.trained_parameters().items():
        part = policy.family.part_of(base_name(name))
        trained_parts.add(part)
        key = parameter.ndim > 1, isinstance(parameter, DTensor), rates.get(part, optim.lr) / optim.lr
        groups.setdefault(key, []).append(parameter)
    if idle := sorted(set(rates) - trained_parts):
        raise ModelError(f"optim.part_lr.{idle[0]}: no parameter of {idle[0]} is trained; remove it")
    return [
        {"params": members, "weight_decay": optim.weight_decay if is_matrix else 0.0, "share": share}
        for (is_matrix, _, share), members in sorted(groups.items(), key=lambda entry: entry[0], reverse=True)
    ]


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every group to its share of `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Compute the L2 norm of all gradients together, fp32."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters.values() if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def clip_gradients(parameters: Mapping[str, nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients, whose norm is `norm`, to a norm of at most `max_norm`."""
    scale = min(1.0, max_norm / (norm + 1e-6))
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def optimizer_tensors(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the state as `NAME.step`, `NAME.exp_avg` and `NAME.exp_avg_sq`, in the order of the names."""
    return {
        f"{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in STATE_NAMES
    }


def restore_optimizer(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state from the result of `optimizer_tensors`. Raises RunError for names of unknown parameters."""
    require_known_states(tensors, parameters)
    for name, parameter in parameters.items():
        if f"{name}.step" in tensors:
            state = {key: tensors[f"{name}.{key}"].clone() for key in STATE_NAMES}
            # The fused kernel reads the step count on the parameter's device, the others on the CPU.
            step_device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
            optimizer.state[parameter] = {
                key: value.to(step_device if key == "step" else parameter.device) for key, value in state.items()
            }


def require_known_states(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise RunError where a checkpoint has the state of a parameter that is not trained here."""
    known = {f"{name}.{key}" for name in parameters for key in STATE_NAMES}
    if unknown := sorted(set(tensors) - known):
        raise RunError(f"optimizer.safetensors has state of unknown parameters, such as {unknown[0]}")
