"""Implement FSDP2: each rank has its share of every decoder layer. A layer is gathered for its pass and freed after it.

With an adapter only the frozen base is sharded; every rank has the whole adapter, whose gradient is summed as in `ddp`.
In full fine-tuning weights, gradients and moments are sharded. With train.shard_size a group of ranks shards a copy of
the model, and the copies' gradients are summed (HSDP). The vision tower is not part of the learner, and every rank has
all of it: otherwise all ranks would have to call it equally often, with or without images.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks, require_group
from tiercel.distributed.strategies.optimizer import optimizer_tensors, restore_optimizer
from tiercel.distributed.strategies.replicated import Replicated, saved_tensors, sum_over_ranks
from tiercel.distributed.strategies.shard_files import SavedTensors, ShardPiece
from tiercel.errors import EnvironmentProblem
from tiercel.models.policy import Policy
from tiercel.models.weights.sharded_model import parts_of


class Sharded(Replicated):
    """Implements `fsdp2`."""

    passes_are_private = False

    def __init__(
        self, recipe: BaseRecipe, ranks: Ranks, policy: Policy, learner: Any, start: Mapping[str, Tensor] | None = None
    ):
        mesh = mesh_of(recipe, ranks, policy.device)
        self.copies = ranks.world_size // mesh.shape[-1]  # of the model; each copy has a rank's share
        options: dict[str, Any] = {"mesh": mesh}
        if policy.peft is not None:
            named = learner.named_parameters()
            options["ignored_params"] = {p for name, p in named if p.requires_grad or ".lora_" in name}
        elif policy.needs_autocast:
            # Autocast would keep a cast copy of every gathered weight until the backward pass, so FSDP2 does the
            # casting.
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy.compute_dtype, reduce_dtype=torch.float32)
            learner.autocast = learner.head_autocast = nullcontext
        if policy.peft is None and learner.value_head is not None:  # computes in float32; every rank has all of it
            options["ignored_params"] = set(learner.value_head.parameters())
        self.layers = list(learner.language_model.layers)
        for layer in self.layers:
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(learner, **options)
        for module in _sharded_modules(learner):
            module.set_gradient_divide_factor(1.0)  # a sum over the ranks, not a mean
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        policy.model.to(policy.device)  # the parts that are not sharded; the layers were moved one by one above
        super().__init__(recipe, ranks, policy, learner, start)

    def reduce_gradients(self) -> float:
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        shares = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
        sum_over_ranks(self.ranks, whole)
        self.scaler.unscale_(self.optimizer)
        of_shares = _square_sum(shares, self.policy.device) / self.copies
        self.ranks.all_reduce(of_shares, "gradient norms")
        return float((_square_sum(whole, self.policy.device) + of_shares).sqrt())

    def model_weights(self) -> dict[str, Tensor]:
        _forget_passes(self.learner)  # after an evaluation the root is still gathered
        return super().model_weights()

    def model_parts(self, most_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield what `model_weights` returns in parts of whole layers, of at most that many bytes unless a layer has
        more. Every rank goes through all parts and has one whole tensor at a time; the first rank has one part."""
        _forget_passes(self.learner)
        tensors = saved_tensors(self.policy.model)
        for names in parts_of({name: _bytes(tensor) for name, tensor in tensors.items()}, most_bytes):
            yield self._on_first({name: tensors[name] for name in names})

    def checkpoint_bytes(self) -> int:
        """Return the number of bytes of a full checkpoint's weights and moments."""
        moments = optimizer_tensors(self.optimizer, self.parameters)
        return sum(map(_bytes, (*saved_tensors(self.policy.model).values(), *moments.values())))

    def shares(self) -> dict[str, Tensor]:
        """Return this rank's part of each trained weight."""
        return {name: _local(parameter) for name, parameter in self.parameters.items()}

    def moment_pieces(self) -> dict[str, ShardPiece]:
        """Return what this rank should write of the result of `optimizer_tensors`: its rows, and some of the tensors
        that all ranks have. Each row is written by one rank."""
        copy, share = divmod(self.ranks.rank, self.ranks.world_size // self.copies)
        shares = self.ranks.world_size // self.copies
        pieces = {}
        for number, (name, tensor) in enumerate(optimizer_tensors(self.optimizer, self.parameters).items()):
            if isinstance(tensor, DTensor):
                start, stop = _rows(tensor, share)
                if start < stop:
                    pieces[name] = ShardPiece(tensor=_local(tensor), start=start)
            elif number % shares == share:
                pieces[name] = ShardPiece(tensor=tensor)
        return pieces if copy == 0 else {}

    def restore(self, tensors: SavedTensors, scaler_state: Mapping[str, Any]) -> None:
        restore_optimizer(self.optimizer, self.parameters, _Shares(tensors, self._share_of_saved))
        self.scaler.load_state_dict(dict(scaler_state))

    def _share_of_saved(self, saved: SavedTensors, name: str) -> Tensor:
        """Read a moment in the way in which its parameter is sharded: this rank's rows of it."""
        parameter = self.parameters[name.rpartition(".")[0]]
        if not isinstance(parameter, DTensor) or name.endswith(".step"):
            return saved[name]
        start, stop = _rows(parameter, self.ranks.rank % (self.ranks.world_size // self.copies))
        return DTensor.from_local(
            saved.rows(name, start, stop).to(self.policy.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Copy the reference's weights into FSDP2's own memory, from which it gathers, and the policy's weights back at
        the end."""
        own = {name: _local(self.parameters[name]).clone() for name in self.start}
        try:
            self._exchange(self.start)
            with self.policy.as_reference():
                yield
        finally:
            self._exchange(own)

    def _exchange(self, weights: Mapping[str, Tensor]) -> None:
        if weights:
            _forget_passes(self.learner)  # otherwise the root may still be gathered
        for name, weight in weights.items():
            _local(self.parameters[name]).copy_(weight)

    def _share(self, parameter: nn.Parameter, weight: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return weight
        return _local(_distributed(parameter, weight.to(self.policy.device))).clone()

    @contextmanager
    def whole_policy(self) -> Iterator[None]:
        modules = _sharded_modules(self.learner)
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
        # Forget the passes of sampling: ranks that sampled more would prefetch in another order than the others.
        _forget_passes(self.learner)
        for layer in self.layers:
            layer.set_reshard_after_forward(True, recurse=False)

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _forget_passes(learner: Any) -> None:
    """Shard all that is gathered, and forget in which order it was used."""
    if hasattr(learner, "reset_iter_state"):
        learner.reset_iter_state()
        return
    root = learner._get_fsdp_state()  # before torch 2.13
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            group._post_forward_indices.clear()
            group._to_sharded()


def mesh_of(recipe: BaseRecipe, ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the mesh of the ranks, in the order of copies and of shares. All ranks must make the first call at once.
    Raises EnvironmentProblem if the number of ranks is not a multiple of train.shard_size."""
    size = recipe.train.shard_size or ranks.world_size
    if ranks.world_size % size:
        raise EnvironmentProblem(
            f"train.shard_size: is {size}, but must divide the number of ranks ({ranks.world_size})"
        )
    require_group(device)
    return _mesh(device.type, ranks.world_size // size, size)


@cache
def _mesh(device_type: str, copies: int, size: int) -> DeviceMesh:
    if copies == 1:
        return init_device_mesh(device_type, (size,))
    return init_device_mesh(device_type, (copies, size), mesh_dim_names=("copies", "shares"))


class _Shares(Mapping[str, Tensor]):
    """This rank's part of saved tensors, each read when it is accessed."""

    def __init__(self, saved: SavedTensors, read: Callable[[SavedTensors, str], Tensor]):
        self._saved = saved
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._saved, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)


def _rows(tensor: DTensor, share: int) -> tuple[int, int]:
    """Return the first row of a share, and the row after its last. FSDP2 gives each share equally many rows of a
    tensor's first dimension; the last shares have fewer, or none."""
    rows = tensor.shape[0]
    each = -(-rows // tensor.device_mesh.shape[-1])
    return min(share * each, rows), min((share + 1) * each, rows)


def _bytes(tensor: Tensor) -> int:
    """Return the number of bytes of the whole tensor."""
    return tensor.numel() * tensor.element_size()


def _distributed(parameter: DTensor, whole: Tensor) -> DTensor:
    """Shard a whole value as the parameter is sharded."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _sharded_modules(learner: nn.Module) -> list[FSDPModule]:
    return [module for module in learner.modules() if isinstance(module, FSDPModule)]


def _square_sum(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Add up the squares of all elements, fp32; 0 if there are no tensors."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
