"""A group that forks: what is learnt from its tree is what its completions teach as sequences by themselves."""

import pytest
import torch
from torch import Tensor

from benchmarks.float64 import all_in_float64, in_float64
from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_policy, tiny_prompts
from tiercel.algorithms import LossInput, policy_loss
from tiercel.config.schema import Algorithm
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.batch import PolicyBatch, advantage_group, group_item, policy_units, totals_of
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.types import Completion, EncodedPrompt

# Two first parts with three continuations each, and one that ended, which stands for its three.
PARTS, CONTINUATIONS = (70, 66, 65), ((5, 9, 1), (3, 8, 70), (0, 0, 0))
ADVANTAGES = (1.5, -0.5, 0.25, -2.0, 0.75, -0.125, 0.5, 0.25, -1.0)


def completions_of(policy: Policy) -> list[Completion]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for part, lengths in zip(PARTS, CONTINUATIONS, strict=True):
        first_L = random_ids(policy.family, part, generator)
        for length in lengths:
            ids_L = torch.cat([first_L, random_ids(policy.family, length, generator)])
            logprobs_L = torch.zeros(len(ids_L))
            made.append(
                Completion(token_ids_L=ids_L, logprobs_L=logprobs_L, text="", is_truncated=False, seed=0, forks=(part,))
            )
    return made


def loss_of(logprobs_N: Tensor, old_N: Tensor, owner_N: Tensor, advantages: Tensor, totals, loss: str) -> Tensor:
    given = LossInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=old_N,
        kl_N=None,
        advantages_C=advantages.to(logprobs_N),
        completion_of_N=owner_N,
        totals=totals,
        longest=200,
    )
    return policy_loss(given, Algorithm(loss=loss)).loss


def gradient_of(policy: Policy) -> Tensor:
    found = torch.cat([weight.grad.flatten().double() for weight in policy.trained_parameters().values()])
    policy.model.zero_grad()
    return found


def plain_logprobs(policy: Policy, prompt: EncodedPrompt, completion: Completion, pictures) -> Tensor:
    ids_T = torch.cat([prompt.token_ids_P, completion.token_ids_L])
    inputs = huggingface_inputs(policy.family, prompt, ids_T, pictures)
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    logits_TV = policy.model(**inputs).logits[0]
    logits_TV = logits_TV.index_fill(1, torch.tensor(policy.family.placeholder_ids), -torch.inf)
    rows_LV = logits_TV[len(prompt.token_ids_P) - 1 : -1].log_softmax(-1)
    return rows_LV.gather(1, completion.token_ids_L[:, None])[:, 0]


@pytest.mark.parametrize(("name", "loss"), [*((name, "grpo") for name in FAMILY_NAMES), ("qwen2_5_vl", "dapo")])
def test_a_shared_part_is_learnt_once_with_the_advantage_of_each_completion(tiny_checkpoints, monkeypatch, name, loss):
    double = in_float64(tiny_policy(tiny_checkpoints[name], noise=0.1), tiny_checkpoints[name])
    encode, pictures = double.family.encode_image, []
    monkeypatch.setattr(double.family, "encode_image", lambda picture: pictures.append(picture) or encode(picture))
    prompt, pictures = tiny_prompts(double.family)[1], pictures[:1]
    completions = completions_of(double)
    group = advantage_group(prompt, completions, ADVANTAGES)
    totals = totals_of([group])
    offsets = [torch.linspace(-0.4, 0.4, len(each.token_ids_L)) for each in completions]  # some ratios are clipped
    with all_in_float64():
        expected_loss = torch.zeros((), dtype=torch.float64)
        for completion, advantage, offset_L in zip(completions, ADVANTAGES, offsets, strict=True):
            logprobs_L = plain_logprobs(double, prompt, completion, pictures)
            owner_L = torch.zeros(len(logprobs_L), dtype=torch.int64)
            old_L = logprobs_L.detach() + offset_L
            own = loss_of(logprobs_L, old_L, owner_L, torch.tensor([advantage]), totals, loss)
            own.backward()
            expected_loss += own.detach()
        expected = gradient_of(double)
        (unit,) = policy_units([group], totals, "dense", 10**6, may_run_prefix=True, family=double.family)
        (batch,) = unit.batches
        learnt = _learn(double, batch, torch.cat(offsets), loss)
        found = gradient_of(double)
    tree = batch.packed.tree
    assert tree.length == len(prompt.token_ids_P) + sum(PARTS) + sum(map(sum, CONTINUATIONS))  # each part once
    assert len(batch.packed.targets_N) == sum(len(each.token_ids_L) for each in completions)  # and scored for each
    torch.testing.assert_close(learnt, expected_loss.to(learnt), rtol=0, atol=1e-12)
    assert float((found - expected).norm() / expected.norm()) < 1e-11


def test_the_head_computes_a_shared_token_once(tiny_checkpoints, monkeypatch):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)
    prompt, completions = tiny_prompts(policy.family)[0], completions_of(policy)
    packed = pack([group_item(prompt, completions)], policy.family)
    learner, seen = PackedPolicy(policy, "dense", False), []
    score = learner.head.forward
    monkeypatch.setattr(learner.head, "forward", lambda *given, **more: seen.append(given) or score(*given, **more))
    found = learner(packed, None, 1.0)
    hidden_MH, targets_M, _ = seen[0]
    assert len(hidden_MH) == len(targets_M) == sum(PARTS) + sum(map(sum, CONTINUATIONS))
    assert len(found.logprobs_N) == len(found.entropy_N) == sum(len(each.token_ids_L) for each in completions)
    apart = pack([group_item(prompt, completions)])
    assert apart.distinct() is None
    torch.testing.assert_close(found.logprobs_N, learner(apart, None, 1.0).logprobs_N, rtol=0, atol=1e-5)


def test_a_group_is_whole_if_its_tree_fits(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    prompt = tiny_prompts(policy.family)[0]
    group = advantage_group(prompt, completions_of(policy), ADVANTAGES)
    length = len(prompt.token_ids_P) + sum(PARTS) + sum(map(sum, CONTINUATIONS))
    for budget, is_whole in ((length, True), (length - 1, False)):
        units = policy_units([group], totals_of([group]), "dense", budget, may_run_prefix=True, family=policy.family)
        assert (len(units) == 1 and units[0].prefixes == ()) == is_whole


def _learn(policy: Policy, batch: PolicyBatch, offsets_N: Tensor, loss: str) -> Tensor:
    learner, vision = PackedPolicy(policy, "dense", False), VisionStore(policy, 0)
    logprobs_N = learner(batch.packed, vision.features(batch.packed.images), 1.0).logprobs_N
    old_N, owner_N = logprobs_N.detach() + offsets_N, batch.packed.continuation_of_N
    own = loss_of(logprobs_N, old_N, owner_N, batch.advantages_C, batch.totals, loss)
    own.backward()
    return own.detach()
