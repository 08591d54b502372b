"""The state of delta nets in packed rows: no token of another sequence reaches it."""

from dataclasses import replace

import pytest
import torch

from tests.models.test_families import items_of
from tests.tiny_models import random_ids, tiny_policy
from tiercel.learner.layout import pack
from tiercel.learner.learner import Learner
from tiercel.models.vision import VisionStore


@pytest.fixture
def policy(tiny_checkpoints):
    return tiny_policy(tiny_checkpoints["qwen3_5"], noise=0.1)


def scores(policy, items, form="split"):
    packed = pack(items)
    with torch.no_grad():
        features = VisionStore(policy, 0).features(packed.images)
        return packed, Learner(policy, form, False)(packed, features, 1.0).logprobs_N


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
