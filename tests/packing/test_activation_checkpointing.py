"""Selective recomputation: what is kept, what is computed again, and that nothing else changes."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_families import items_of, policy_of
from tiercel.config.schema import Learner as LearnerKeys
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack


class Counted(TorchDispatchMode):
    """Counts calls of attention, and of products by weights with as many numbers as the MLP's."""

    def __init__(self, mlp: int):
        super().__init__()
        self.mlp = mlp
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.calls["attention"] += "flash_attention_for_cpu" in name and "backward" not in name
        self.calls["products"] += name == "aten::mm" and args[1].numel() == self.mlp
        return func(*args, **(kwargs or {}))


def counted_pass(checkpoint, checkpointing) -> tuple[Counter[str], Counter[str], int]:
    """Calls in the forward and in the backward pass, and the number of layers."""
    policy = policy_of(checkpoint, lora_noise=0.1)
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(6)))
    features = VisionStore(policy, 0).features(packed.images)
    learner = PackedPolicy(policy, "split", checkpointing).train()
    config = learner.language_model.config
    with Counted(config.hidden_size * config.intermediate_size) as forward:
        loss = learner(packed, features, 1.0).logprobs_N.sum()
    with Counted(config.hidden_size * config.intermediate_size) as backward:
        loss.backward()
    return forward.calls, backward.calls, config.num_hidden_layers


def test_attention_and_every_second_large_product_are_kept(tiny_checkpoints):
    found = {kind: counted_pass(tiny_checkpoints["qwen2_5_vl"], kind) for kind in (False, "selective", "full")}
    forward, without, layers = found[False]
    again = {kind: found[kind][1] - without for kind in ("selective", "full")}
    assert forward["products"] == 3 * layers
    assert again["full"]["attention"] == forward["attention"] > 0
    assert again["full"]["products"] == 3 * layers
    assert again["selective"]["attention"] == 0
    assert again["selective"]["products"] == layers  # the second of gate, up and down


def test_true_reads_as_full():
    assert LearnerKeys(gradient_checkpointing=True).gradient_checkpointing == "full"
    assert LearnerKeys(gradient_checkpointing=False).gradient_checkpointing is False
    assert LearnerKeys(gradient_checkpointing="selective").gradient_checkpointing == "selective"
