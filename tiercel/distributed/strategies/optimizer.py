"""Build AdamW or Muon, clip gradients, and save and restore the optimiser's state as tensors.

torch's own AdamW keeps its moments in float32. Those of bitsandbytes keep them in 8 bits (Dettmers et al. 2022,
arXiv:2110.02861), or in memory that moves to the host when the GPU's is short.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiercel.config.schema import Optim
from tiercel.distributed.strategies.muon import MuonAndAdamW, layer_matrices
from tiercel.errors import EnvironmentProblem, ModelError, RunError
from tiercel.models.policy import Policy, base_name

STATE_NAMES = ("step", "exp_avg", "exp_avg_sq")
MUON_STATE_NAME = "momentum_buffer"
# The names of bitsandbytes; its maps of codes are constant.
OWN_STATE_NAMES = ("step", "state1", "state2", "absmax1", "absmax2")
OF_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW32bit", "paged_adamw_8bit": "PagedAdamW8bit"}


def build_optimizer(policy: Policy, optim: Optim) -> torch.optim.Optimizer:
    """Build the optimiser of all trained parameters. torch's AdamW runs in one kernel on a GPU, otherwise by operations
    on all parameters together, which give the same bytes on a CPU as ever. Raises EnvironmentProblem for paged moments
    without a GPU, and ModelError as `parameter_groups` does."""
    groups = parameter_groups(policy, optim)
    settings: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    is_fused = policy.device.type == "cuda"
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, **settings, fused=is_fused, foreach=not is_fused)
    if optim.name == "muon":
        parts = [[group for group in groups if group["by_muon"] == by_muon] for by_muon in (True, False)]
        return MuonAndAdamW(*parts, momentum=optim.momentum, **settings, fused=is_fused, foreach=not is_fused)
    import bitsandbytes

    require_optimizer(optim, policy.device)
    return getattr(bitsandbytes.optim, OF_BITSANDBYTES[optim.name])(groups, **settings)


def require_optimizer(optim: Optim, device: torch.device) -> None:
    """Raise EnvironmentProblem for paged moments without a GPU."""
    if optim.is_paged and device.type != "cuda":
        raise EnvironmentProblem(
            f"optim.name: {optim.name} needs a GPU, whose memory it saves; use adamw or adamw_8bit"
        )


def parameter_groups(policy: Policy, optim: Optim) -> list[dict[str, Any]]:
    """Group the parameters for the optimiser. Only matrices have weight decay, not norms and biases. Sharded parameters
    have their own groups, because no operation takes them together with whole ones. `share` is the group's learning
    rate divided by optim.lr; `by_muon` says whether Muon updates the group. Raises ModelError if a part has a learning
    rate but no trained parameter, and if Muon has nothing to update."""
    rates = {part: rate for part, rate in optim.part_lr if rate is not None}
    matrices = layer_matrices(policy.model) if optim.name == "muon" else frozenset()
    groups: dict[tuple[bool, bool, bool, float], list[nn.Parameter]] = {}
    trained_parts = set()
    for name, parameter in policy.trained_parameters().items():
        part = policy.family.part_of(base_name(name))
        trained_parts.add(part)
        share = rates.get(part, optim.lr) / optim.lr
        key = name in matrices, parameter.ndim > 1, isinstance(parameter, DTensor), share
        groups.setdefault(key, []).append(parameter)
    if idle := sorted(set(rates) - trained_parts):
        raise ModelError(f"optim.part_lr.{idle[0]}: is set, but no parameter of {idle[0]} is trained; remove this key")
    if optim.name == "muon" and not any(by_muon for by_muon, *_ in groups):
        raise ModelError("optim.name: is muon, but no matrix of a layer is trained; set adamw")
    return [
        {
            "params": members,
            "weight_decay": optim.weight_decay if is_matrix else 0.0,
            "share": share,
            "by_muon": by_muon,
        }
        for (by_muon, is_matrix, _, share), members in sorted(groups.items(), key=lambda entry: entry[0], reverse=True)
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
    """Scale all gradients, whose norm is `norm`, to a norm of at most `max_norm`. 0: leave them as they are."""
    if max_norm == 0:
        return
    scale = min(1.0, max_norm / (norm + 1e-6))
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the state as `NAME.step`, `NAME.exp_avg` and `NAME.exp_avg_sq`, in the order of the names. A matrix that
    Muon updates has `NAME.momentum_buffer` instead; bitsandbytes' optimisers have their own keys."""
    return {
        f"{name}.{key}": torch.as_tensor(optimizer.state[parameter][key])
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for key in ((*STATE_NAMES, MUON_STATE_NAME) if _is_of_torch(optimizer) else OWN_STATE_NAMES)
        if key in optimizer.state[parameter]
    }


def restore_optimizer(optimizer: Any, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Restore the state from the result of `optimizer_tensors`. Raises RunError for names of unknown parameters."""
    require_known_states(tensors, parameters)
    if not _is_of_torch(optimizer):
        _restore_own(optimizer, parameters, tensors)
        return
    for name, parameter in parameters.items():
        if (key := f"{name}.{MUON_STATE_NAME}") in tensors:
            optimizer.state[parameter] = {MUON_STATE_NAME: tensors[key].clone().to(parameter.device)}
        if f"{name}.step" in tensors:
            state = {key: tensors[f"{name}.{key}"].clone() for key in STATE_NAMES}
            # The fused kernel reads the step count on the parameter's device, the others read it on the CPU.
            step_device = parameter.device if optimizer.defaults["fused"] else torch.device("cpu")
            optimizer.state[parameter] = {
                key: value.to(step_device if key == "step" else parameter.device) for key, value in state.items()
            }


def _is_of_torch(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.AdamW | MuonAndAdamW)


def _restore_own(optimizer: Any, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Let bitsandbytes create its state, and copy what was saved into it."""
    names = {parameter: name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names[parameter]
            if f"{name}.step" not in tensors:
                continue
            optimizer.init_state(group, parameter, number, place)
            state = optimizer.state[parameter]
            for key in (key for key in OWN_STATE_NAMES if key in state):
                saved = tensors[f"{name}.{key}"]
                state[key] = int(saved) if key == "step" else state[key].copy_(saved)


def require_known_states(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise RunError if a checkpoint has the state of a parameter that is not trained here."""
    if unknown := sorted(name for name in tensors if name.rpartition(".")[0] not in parameters):
        raise RunError(f"the checkpoint has optimiser state for unknown parameters, such as {unknown[0]}")
