"""Implement DeepSpeed's ZeRO: it partitions weights, gradients and moments, and saving gathers them.

DeepSpeed averages gradients over the ranks, so the loss is multiplied by their number. docs/decisions.md describes what
DeepSpeed did on two ranks, and which mistakes make it hang.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tiercel.config.deepspeed import zero_config
from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks, require_group
from tiercel.distributed.strategies.optimizer import (
    STATE_NAMES,
    parameter_groups,
    require_known_states,
    set_learning_rate,
)
from tiercel.distributed.strategies.replicated import saved_tensors
from tiercel.errors import EnvironmentProblem, ModelError
from tiercel.models.policy import Policy


class Zero:
    """Implements `deepspeed`."""

    passes_are_private = False
    loss_scale = 1.0

    def __init__(
        self, recipe: BaseRecipe, ranks: Ranks, policy: Policy, learner: Any, start: Mapping[str, Tensor] | None = None
    ):
        assert not start  # a recipe that would need it is refused
        deepspeed = _import_deepspeed(policy.device)
        self.ranks = ranks
        self.policy = policy
        self.parameters = policy.trained_parameters()
        inside = set(map(id, learner.parameters()))
        if outside := [name for name, p in self.parameters.items() if id(p) not in inside]:
            raise ModelError(
                f"train.strategy: deepspeed trains only the language model, and {outside[0]} is not part of it; set "
                "train.strategy: fsdp2, or other lora.targets"
            )
        config = zero_config(recipe, on_cpu=policy.device.type == "cpu")
        self.stage = config["zero_optimization"]["stage"]
        groups = parameter_groups(policy, recipe.optim)
        require_group(policy.device)
        if self.stage == 3:
            _partition(deepspeed, learner, config, policy.device)
        self.learner, *_ = deepspeed.initialize(model=learner, model_parameters=groups, config=config)
        if policy.device.type == "cuda":
            for name, module in policy.model.named_modules():  # the tower, which DeepSpeed does not know
                if policy.family.part_of(name + ".") in ("vision", "projector"):
                    module.to(policy.device)

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self.learner.optimizer, rate)

    def zero_gradients(self) -> None:
        """Do nothing: DeepSpeed drops the gradients in its step."""

    def discard_gradients(self) -> None:
        """Do nothing: a recipe that needs this is refused, because DeepSpeed keeps the gradients."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.learner.set_gradient_accumulation_boundary(is_last)
        self.learner.backward(loss * self.ranks.world_size)

    def reduce_gradients(self) -> float:
        from deepspeed.utils import safe_get_full_grad, safe_get_local_grad

        if self.stage < 3:  # every rank can read every whole gradient
            norms = [torch.linalg.vector_norm(safe_get_full_grad(p)) for p in self.parameters.values()]
            return float(torch.stack(norms).square().sum().sqrt())
        shares = [safe_get_local_grad(p) for p in self.parameters.values()]
        total = torch.stack([torch.linalg.vector_norm(share, dtype=torch.float32) for share in shares]).square().sum()
        self.ranks.all_reduce(total, "gradient norms")
        return float(total.sqrt())

    def gradients(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        return self._on_first({name: safe_get_full_grad(p) for name, p in self.parameters.items()})

    def update(self, norm: float, max_norm: float) -> bool:
        """Update the weights. DeepSpeed itself clips to the norm in its config, which comes from the recipe."""
        if math.isfinite(norm):
            self.learner.step()
        return math.isfinite(norm)

    def trained_weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        kept: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            kept |= self._on_first({name: safe_get_full_fp32_param(parameter)})
        return kept

    def model_weights(self) -> dict[str, Tensor]:
        import deepspeed

        kept: dict[str, Tensor] = {}
        for name, tensor in saved_tensors(self.policy.model).items():
            if name in self.parameters:
                continue
            with deepspeed.zero.GatheredParameters([tensor]):
                kept |= self._on_first({name: tensor})
        return kept | self.trained_weights()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        kept: dict[str, Tensor] = {}
        if not self.learner.optimizer.optimizer.state:  # DeepSpeed makes it at the first update
            return kept
        for name, parameter in self.parameters.items():
            for key in STATE_NAMES[1:]:
                value = safe_get_full_optimizer_state(parameter, key)
                if value is not None:
                    kept |= self._on_first({f"{name}.{key}": value.reshape(self._shape(parameter))})
            kept |= self._on_first({f"{name}.step": self._step_count()})
        return kept

    def scaler_state(self) -> dict[str, Any]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor], scaler_state: Mapping[str, Any]) -> None:
        require_known_states(tensors, self.parameters)
        steps = [tensors[name] for name in tensors if name.endswith(".step")]
        if not steps:
            return
        outer = self.learner.optimizer
        flats = outer.fp32_partitioned_groups_flat if self.stage == 3 else outer.single_partition_of_fp32_groups
        for flat in flats:  # DeepSpeed only creates its state at the first step
            moments = {key: torch.zeros_like(flat, requires_grad=False) for key in STATE_NAMES[1:]}
            outer.optimizer.state[flat] = {"step": steps[0].clone(), **moments}
        if self.stage < 3:
            outer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.parameters.items():
            for key in STATE_NAMES[1:]:
                self._set_moment(parameter, key, tensors[f"{name}.{key}"])

    @contextmanager
    def moved(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        from deepspeed.utils import safe_get_full_fp32_param

        before = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in self.parameters.items()}
        self._set_weights({name: change(weight) for name, weight in before.items()})
        try:
            yield
        finally:
            self._set_weights(before)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Switch the adapter off or to the reference's. A recipe that would need a copy of whole weights is refused."""
        with self.policy.as_reference():
            yield

    @contextmanager
    def whole_policy(self) -> Iterator[None]:
        from deepspeed.runtime.zero import unwrap_model_for_generation

        if self.stage < 3:
            yield
            return
        with unwrap_model_for_generation(self.learner):
            yield

    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set both copies that DeepSpeed has of each weight: the one that it updates, and the one that passes use."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        for name, parameter in self.parameters.items():
            if self.stage < 3:
                safe_set_full_fp32_param(parameter, weights[name])
                continue
            share = self._share(parameter, weights[name])
            safe_set_local_fp32_param(parameter, share)
            parameter.ds_tensor.data.copy_(share.view_as(parameter.ds_tensor))  # type: ignore[attr-defined]
            if parameter.numel() == weights[name].numel():  # a small parameter, which is always gathered
                parameter.data.copy_(weights[name].view_as(parameter))
        if self.stage < 3:
            self.learner.optimizer.update_lp_params()

    def _share(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Return this rank's part of a whole value, padded as DeepSpeed pads it."""
        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = value.new_zeros(size * self.ranks.world_size)
        padded[: value.numel()] = value.flatten()
        return padded[size * self.ranks.rank :][:size]

    def _set_moment(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        value = value.to(self.policy.device)
        if self.stage < 3:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        safe_set_local_optimizer_state(parameter, self._share(parameter, value), key)

    def _step_count(self) -> Tensor:
        counts = [state["step"] for state in self.learner.optimizer.optimizer.state.values()]
        return torch.as_tensor(counts[0], dtype=torch.float32)

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def _on_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.ranks.is_first:
            return {}
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _partition(deepspeed: Any, learner: nn.Module, config: Mapping[str, Any], device: torch.device) -> None:
    """Move one parameter after the other to the device and partition it there, before DeepSpeed would move the whole
    model. Each is copied, even on a CPU: the original is part of a checkpoint file that all ranks map, and DeepSpeed
    would write to it."""

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        parameter.data = parameter.data.to(device, copy=True)
        return parameter

    deepspeed.init_distributed()
    first, *others = learner.parameters()
    deepspeed.zero.Init(module=nn.ParameterList([copied(first)]), config_dict_or_path=config)
    first.convert_to_zero_parameters(param_list=map(copied, others))  # type: ignore[attr-defined]
    for buffer in learner.buffers():  # DeepSpeed does not move the buffers of a partitioned model
        buffer.data = buffer.data.to(device)


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise EnvironmentProblem(
            f"train.strategy: deepspeed: the package cannot be imported ({error}); pip install deepspeed, or set "
            "train.strategy: fsdp2, which needs no additional package"
        ) from error
    return deepspeed
