"""The gated delta rule in float64, token by token (Yang et al. 2024, https://arxiv.org/abs/2412.06464, equation 10).

The rule of transformers computes in float32 whatever the model's dtype is, so it cannot be its own reference.

Shape suffixes: docs/shapes.md, and A the heads of the values, as in tiercel/models/layers/delta_net.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, einsum, nn

from tests.tiny_models import tiny_policy
from tiercel.models.layers.experts import mixtures
from tiercel.models.policy import Policy

CHUNKED_RULE = "torch_chunk_gated_delta_rule"  # the name by which transformers' models call it


def in_float64(policy: Policy, checkpoint: Path) -> Policy:
    """Return a policy with the same weights in float64. `checkpoint` is that of the base model."""
    double = tiny_policy(checkpoint, dtype="float32")
    double = replace(double, model=double.model.double(), compute_dtype=torch.float64)
    if mixtures(double.model):
        double.model.set_experts_implementation("eager")  # grouped products do not support float64
    double.model.load_state_dict(policy.model.state_dict())
    return double


@contextmanager
def rule_in_float64(model: nn.Module) -> Iterator[None]:
    """Make a model's delta nets compute their recurrence in float64. Nothing changes in a model without one."""
    homes = {import_module(type(module).__module__) for module in model.modules() if hasattr(module, "A_log")}
    rules = {home: getattr(home, CHUNKED_RULE) for home in homes}
    for home in rules:
        setattr(home, CHUNKED_RULE, _float64_rule)
    try:
        yield
    finally:
        for home, rule in rules.items():
            setattr(home, CHUNKED_RULE, rule)


def _float64_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Compute the rule with the arguments and results of transformers' rule. `g` is the logarithm of the decay and
    `beta` the rate."""
    repeats = value.shape[2] // key.shape[2]
    query_RTAE, key_RTAE = (_unit(each.double()).repeat_interleave(repeats, dim=2) for each in (query, key))
    query_RTAE = query_RTAE / query.shape[-1] ** 0.5
    value_RTAE, decay_RTA, rate_RTA = value.double(), g.double().exp(), beta.double()
    start = options.get("initial_state")
    memory_RAEE = value_RTAE.new_zeros(key_RTAE[:, 0].shape + value.shape[-1:]) if start is None else start.double()
    outputs = []
    for t in range(value.shape[1]):
        memory_RAEE = memory_RAEE * decay_RTA[:, t, :, None, None]
        found_RAE = einsum("rakv,rak->rav", memory_RAEE, key_RTAE[:, t])
        change_RAE = (value_RTAE[:, t] - found_RAE) * rate_RTA[:, t, :, None]
        memory_RAEE = memory_RAEE + einsum("rak,rav->rakv", key_RTAE[:, t], change_RAE)
        outputs.append(einsum("rakv,rak->rav", memory_RAEE, query_RTAE[:, t]))
    return torch.stack(outputs, dim=1).to(query), memory_RAEE


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)
