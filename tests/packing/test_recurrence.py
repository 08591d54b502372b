"""The state of delta nets in packed rows: no token of another sequence reaches it."""

from dataclasses import replace
from functools import wraps

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.models.test_families import items_of
from tests.tiny_models import random_ids, tiny_policy
from tiercel.models.layers.delta_net import rule_in_use
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack


@pytest.fixture
def policy(tiny_checkpoints):
    return tiny_policy(tiny_checkpoints["qwen3_5"], noise=0.1)


def scores(policy, items, form="split"):
    packed = pack(items)
    with torch.no_grad():
        features = VisionStore(policy, 0).features(packed.images)
        return packed, PackedPolicy(policy, form, False)(packed, features, 1.0).logprobs_N


@pytest.mark.parametrize("form", ("split", "dense"))
def test_other_tokens_change_no_bit(policy, form):
    generator = torch.Generator().manual_seed(3)
    items = items_of(policy.family, generator)
    packed, before = scores(policy, items, form)
    for number in range(9):  # three groups of three completions
        group, place = divmod(number, 3)
        one = items[group].continuations[place]
        other_ids = random_ids(policy.family, len(one.token_ids_L), generator)
        others = [
            replace(one, token_ids_L=other_ids) if i == place else each
            for i, each in enumerate(items[group].continuations)
        ]
        swapped = [replace(item, continuations=tuple(others)) if i == group else item for i, item in enumerate(items)]
        _, after = scores(policy, swapped, form)
        is_same = packed.continuation_of_N != number
        assert torch.equal(after[is_same], before[is_same])
        assert not torch.equal(after[~is_same], before[~is_same])


def test_a_cpu_never_runs_the_kernels_of_a_gpu(policy, monkeypatch):
    """Where flash-linear-attention is installed, transformers hides its own rule behind the kernels'."""
    generator = torch.Generator().manual_seed(3)
    items = items_of(policy.family, generator)
    _, before = scores(policy, items)
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    @wraps(rule)
    def kernels(*args, **options):
        raise RuntimeError("no GPU")

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", kernels)
    _, after = scores(policy, items)
    assert torch.equal(after, before)


def test_the_start_of_a_run_says_what_computes_the_recurrence(policy, tiny_checkpoints):
    decoder = policy.family.language_model(policy.model)
    assert rule_in_use(decoder, torch.device("cpu")) == "transformers' own code"
    on_gpu = rule_in_use(decoder, torch.device("cuda"))
    assert on_gpu.startswith("transformers' own code; flash-linear-attention, whose kernels are faster, cannot be")
    other = tiny_policy(tiny_checkpoints["qwen2_vl"], noise=0.1)
    assert rule_in_use(other.family.language_model(other.model), torch.device("cuda")) is None
