"""The float64 rule against the one of transformers, which computes in float32."""

import pytest
import torch
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from benchmarks.delta_rule import CHUNKED_RULE, rule_in_float64


class LayerWithAState(modeling.Qwen3_5GatedDeltaNet):
    """A layer without weights but for the one by which such layers are known."""

    def __init__(self):
        nn.Module.__init__(self)
        self.A_log = nn.Parameter(torch.zeros(4))


LayerWithAState.__module__ = modeling.__name__


def inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two rows of 70 tokens, more than a chunk."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "query": random(2, 70, 4, 8),
        "key": random(2, 70, 4, 8),
        "value": random(2, 70, 4, 6),
        "g": -random(2, 70, 4).abs(),
        "beta": random(2, 70, 4).sigmoid(),
        "initial_state": random(2, 4, 8, 6),
    }


@pytest.mark.parametrize("has_start", (True, False))
def test_the_rule_is_that_of_transformers_without_its_rounding(has_start: bool):
    chunked = getattr(modeling, CHUNKED_RULE)
    given = inputs(torch.float64)
    if not has_start:
        given["initial_state"] = None
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    theirs, their_state = chunked(**given, **options)
    with rule_in_float64(LayerWithAState()):
        ours, our_state = getattr(modeling, CHUNKED_RULE)(**given, **options)
    assert our_state.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(our_state, their_state.double(), atol=1e-5, rtol=1e-5)
    assert not torch.equal(ours, theirs)


def test_heads_of_the_values_share_those_of_the_keys():
    given = inputs(torch.float64)
    few = {name: given[name][:, :, :2] for name in ("query", "key")}
    repeated = {name: value.repeat_interleave(2, dim=2) for name, value in few.items()}
    with rule_in_float64(LayerWithAState()):
        rule = getattr(modeling, CHUNKED_RULE)
        assert torch.equal(rule(**{**given, **few})[0], rule(**{**given, **repeated})[0])


def test_a_model_without_such_layers_is_left_as_it_is():
    chunked = getattr(modeling, CHUNKED_RULE)
    with rule_in_float64(nn.Linear(2, 2)):
        assert getattr(modeling, CHUNKED_RULE) is chunked
    with rule_in_float64(LayerWithAState()):
        assert getattr(modeling, CHUNKED_RULE) is not chunked
    assert getattr(modeling, CHUNKED_RULE) is chunked
