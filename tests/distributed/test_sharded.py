"""FSDP2's own state, which methods of another name clear in older versions of torch (`make test-lowest`)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tiercel.distributed.strategies.sharded import _forget_passes


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_passes_are_forgotten_and_everything_is_sharded_again(group):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    given = torch.ones(2, 4)
    first = model(given)
    order = model._get_fsdp_state()._comm_ctx.post_forward_order
    assert order and not isinstance(model[0].weight, DTensor)
    _forget_passes(model)
    assert not order and all(isinstance(parameter, DTensor) for parameter in model.parameters())
    torch.testing.assert_close(model(given), first)
