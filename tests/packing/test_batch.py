"""Microbatches: which groups share one, what is left out, and that the token budget never changes a gradient."""

import math
from dataclasses import replace

import pytest
import torch

from tests.packing.items import bins, item, learnable_groups, prompt, scored_group
from tests.tiny_models import move_adapter, random_ids, tiny_policy, tiny_prompts
from tiercel.algorithms import LossInput, Totals, policy_loss
from tiercel.config.schema import Algorithm
from tiercel.errors import DataError
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.prefix import passes
from tiercel.packing.batch import (
    PolicyBatch,
    advantage_groups,
    policy_units,
    totals_of,
    without_zero_groups,
)
from tiercel.packing.examples import conversation_item
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.types import EncodedConversation

HUGE = 10**6
TOTALS = Totals(tokens=1, completions=1, groups=1)  # for tests in which the sizes do not matter


def test_bins_are_filled_in_order():
    items = [item(2, 3, index=0), item(4, 1, index=1), item(6, 4, index=2), item(1, 1, index=3)]  # 5, 5, 10, 2
    assert bins([(each,) for each in items], "dense", 10) == [[0, 1], [2], [3]]
    assert bins([(each,) for each in items], "dense", 12) == [[0, 1], [2, 3]]
    assert bins([(each,) for each in items], "dense", 22) == [[0, 1, 2, 3]]


def test_the_repeated_form_pays_for_every_prompt():
    items = [item(4, 1, 1, index=0), item(4, 2, index=1)]  # dense 6 and 6, repeated 10 and 6
    assert bins([(each,) for each in items], "dense", 12) == [[0, 1]]
    assert bins([(each,) for each in items], "repeated", 12) == [[0], [1]]


def test_an_item_that_fits_nowhere_is_refused_with_its_numbers():
    with pytest.raises(DataError, match=r"row row-7: 11 tokens .*max_tokens_per_microbatch = 10; raise it") as error:
        bins([(item(2, 3),), (item(6, 5, index=7),)], "dense", 10)
    assert error.value.field == "messages"


def test_masked_completions_are_left_out():
    group = scored_group(prompt([1, 2], 4), [([5], 1.0), ([6, 7], None), ([8, 9, 10], 3.0)])
    (learnable,) = learnable_groups([group])
    assert [c.token_ids_L.tolist() for c in learnable.item.continuations] == [[5], [8, 9, 10]]
    assert [c.positions_DL.tolist() for c in learnable.item.continuations] == [[[2]], [[2, 3, 4]]]
    assert [logprobs.tolist() for logprobs in learnable.sampler_logprobs] == [[-1], [-1, -2, -3]]
    torch.testing.assert_close(learnable.advantages_G, torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-4))
    assert totals_of([learnable]) == Totals(tokens=4, completions=2, groups=1)


def test_groups_without_an_advantage_are_left_out():
    groups = [scored_group(prompt([1], index), [([5], 1.0), ([6], None)]) for index in range(2)]
    (learnable,) = advantage_groups(groups, [[None, None], [0.5, None]])
    assert learnable.item.prompt.index == 1 and learnable.advantages_G.tolist() == [0.5]
    assert totals_of([]) == Totals(tokens=0, completions=0, groups=0)
    assert policy_units([], TOTALS, "dense", 10, True) == []


def test_batches_carry_everything_in_the_order_of_the_completions():
    groups = learnable_groups(
        [
            scored_group(prompt([1, 2, 3], 0), [([5], 0.0), ([6, 7], 2.0)]),
            scored_group(prompt([4], 1), [([8, 9], 1.0), ([10], 0.0), ([11], -1.0)]),
        ]
    )
    totals = totals_of(groups)
    assert totals == Totals(tokens=7, completions=5, groups=2)
    (unit,) = policy_units(groups, totals, "dense", 11, True)
    (batch,) = unit.batches
    assert unit.prefixes == ()
    assert batch.packed.token_ids_T.tolist() == [1, 2, 3, 5, 6, 7, 4, 8, 9, 10, 11]
    assert batch.packed.targets_N.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert batch.packed.continuation_of_N.tolist() == [0, 1, 1, 2, 2, 3, 4]
    assert batch.sampler_logprobs_N.tolist() == [-1, -1, -2, -1, -2, -1, -1]
    torch.testing.assert_close(
        batch.advantages_C, torch.cat([torch.tensor([-1, 1]) / (2**0.5 + 1e-4), torch.tensor([1, 0, -1]) / 1.0001])
    )
    assert batch.totals is totals
    assert batch.prompt_ids == ("row-0", "row-1")


def whole_batches(groups, form: str, budget: int) -> list[PolicyBatch]:
    """Microbatches that carry their prompts themselves."""
    units = policy_units(groups, TOTALS, form, budget, False)
    assert all(unit.prefixes == () and len(unit.batches) == 1 for unit in units)
    return [unit.batches[0] for unit in units]


def test_a_large_group_is_cut_between_completions():
    completions = [([10 * n] * n, float(n)) for n in (1, 2, 3, 4)]
    groups = learnable_groups([scored_group(prompt([1, 2, 3], 0), completions)])
    batches = whole_batches(groups, "dense", 7)  # 3 + (1 + 2), 3 + 3, 3 + 4
    assert [batch.packed.token_ids_T.tolist() for batch in batches] == [
        [1, 2, 3, 10, 20, 20],
        [1, 2, 3, 30, 30, 30],
        [1, 2, 3, 40, 40, 40, 40],
    ]
    assert torch.equal(torch.cat([batch.advantages_C for batch in batches]), groups[0].advantages_G)
    assert [batch.sampler_logprobs_N.tolist() for batch in batches] == [[-1, -1, -2], [-1, -2, -3], [-1, -2, -3, -4]]
    repeated = whole_batches(groups, "repeated", 9)  # 3 + 1 + 3 + 2, 3 + 3, 3 + 4
    assert [len(batch.packed.targets_N) for batch in repeated] == [3, 3, 4]


def test_a_large_group_shares_one_pass_over_its_prompt():
    small = [scored_group(prompt([7], index), [([8], 1.0), ([9], 0.0)]) for index in (0, 2, 3)]
    large = scored_group(prompt([1, 2, 3], 1), [([10 * n] * n, float(n)) for n in (1, 2, 3, 4)])
    groups = learnable_groups([small[0], large, *small[1:]])
    units = policy_units(groups, TOTALS, "split", 7, True)
    assert [len(unit.batches) for unit in units] == [1, 3, 1]
    assert [len(unit.prefixes) for unit in units] == [0, 1, 0]
    (prefix,) = units[1].prefixes
    assert prefix.packed.token_ids_T.tolist() == [1, 2, 3] and len(prefix.packed.targets_N) == 0
    assert [units[1].computed(number) for number in range(3)] == [6, 3, 4]
    assert [batch.packed.tree.length for batch in units[1].batches] == [6, 6, 7]
    assert units[2].batches[0].prompt_ids == ("row-2", "row-3")
    assert [len(unit.batches) for unit in policy_units(groups, TOTALS, "dense", 7, False)] == [1] * 5


def test_groups_without_advantage_stay_out_and_are_counted_in_the_totals():
    equal = scored_group(prompt([7], 0), [([8], 1.0), ([9], 1.0)])
    unequal = scored_group(prompt([1, 2, 3], 1), [([5], 0.0), ([6], 1.0)])
    groups = learnable_groups([equal, unequal])
    assert [group.item.prompt.index for group in without_zero_groups(groups, keeps_nan=False)] == [1]
    assert totals_of(groups) == Totals(tokens=4, completions=4, groups=2)


@pytest.mark.parametrize("keeps_nan", (True, False))
def test_a_group_without_advantage_whose_logprobs_are_nan_may_be_kept(keeps_nan):
    (group,) = learnable_groups([scored_group(prompt([7], 0), [([8], 1.0), ([9], 1.0)])])
    unknown = replace(group, sampler_logprobs=(torch.tensor([math.nan]), *group.sampler_logprobs[1:]))
    assert without_zero_groups([unknown], keeps_nan=keeps_nan) == [unknown] * keeps_nan


@pytest.mark.parametrize("form", ("dense", "split"))
@pytest.mark.parametrize("place", (0, 1, 2))
def test_a_completion_that_fits_nowhere_is_refused(place, form):
    lengths = [1, 1, 1]
    lengths[place] = 5
    completions = [([9] * length, float(length)) for length in lengths] + [([9], 0.0)]
    groups = learnable_groups([scored_group(prompt([1, 2, 3], 6), completions)])
    with pytest.raises(DataError, match="row row-6: 8 tokens"):
        policy_units(groups, TOTALS, form, 7, True)


def test_a_conversation_is_an_item_of_one_continuation():
    start = prompt([1, 2])
    conversation = EncodedConversation(
        prompt=start,
        token_ids_L=torch.tensor([3, 4, 5]),
        positions_DL=torch.tensor([[2, 3, 4]]),
        is_scored_L=torch.tensor([True, False, True]),
    )
    packed = pack([conversation_item(conversation)])
    assert packed.targets_N.tolist() == [3, 5]
    assert packed.scoring_N.tolist() == [1, 3]


@pytest.fixture(scope="module", params=("qwen2_5_vl", "qwen3_5", "qwen3_vl_moe", "gemma3", "gemma4"))
def ragged_case(tiny_checkpoints, request):
    """A policy that has moved since it sampled ragged, partly masked groups on none, one and two images."""
    policy = tiny_policy(tiny_checkpoints[request.param], noise=0.1)
    generator = torch.Generator().manual_seed(3)
    scored = []
    for number, start in enumerate(tiny_prompts(policy.family)):
        lengths = ((5, 1, 8), (2, 9, 4, 1), (3, 6, 7))[number]
        totals = torch.randn(len(lengths), generator=generator).tolist()
        completions = [
            (random_ids(policy.family, length, generator).tolist(), total)
            for length, total in zip(lengths, totals, strict=True)
        ]
        completions.append((random_ids(policy.family, 3, generator).tolist(), None))
        scored.append(scored_group(start, completions))
    groups = learnable_groups(scored)
    vision = VisionStore(policy, 0)
    (whole,) = policy_units(groups, totals_of(groups), "dense", HUGE, False)[0].batches
    with torch.no_grad():
        features = vision.features(whole.packed.images)
        sampled = PackedPolicy(policy, "dense", False)(whole.packed, features, 0.9).logprobs_N
    by_group = iter(sampled.split([len(row) for group in groups for row in group.sampler_logprobs]))
    for group in groups:
        for row in group.sampler_logprobs:
            row.copy_(next(by_group))
    move_adapter(policy, 0.1, seed=2)
    return policy, vision, groups


def gradient(case, form: str, budget: int, may_run_prefix: bool = False, checkpointing: bool = False):
    """Gradient and loss of the whole minibatch, and the numbers of microbatches and of passes over a prompt alone."""
    policy, vision, groups = case
    learner = PackedPolicy(policy, form, checkpointing).train()
    policy.model.zero_grad(set_to_none=True)
    units = policy_units(groups, totals_of(groups), form, budget, may_run_prefix)
    total = 0.0
    for unit in units:
        for batch, features, prefix in passes(unit, learner.run_prefix, vision.features):
            logprobs = learner(batch.packed, features, 0.9, prefix).logprobs_N
            loss = policy_loss(
                LossInput(
                    logprobs_N=logprobs,
                    old_logprobs_N=batch.sampler_logprobs_N,
                    kl_N=None,
                    advantages_C=batch.advantages_C,
                    completion_of_N=batch.packed.continuation_of_N,
                    totals=batch.totals,
                    longest=10,
                ),
                Algorithm(clip_low=0.2, clip_high=0.3),
            ).loss
            loss.backward()
            total += float(loss.detach())
    if checkpointing:
        policy.model.gradient_checkpointing_disable()
    policy.model.eval()
    flat = torch.cat([parameter.grad.flatten() for parameter in policy.trained_parameters().values()])
    return flat.clone(), total, sum(len(unit.batches) for unit in units), sum(len(unit.prefixes) for unit in units)


def smallest_budget(groups) -> int:
    """Just enough for the longest completion with its prompt."""
    return max(
        len(group.item.prompt.token_ids_P) + len(continuation.token_ids_L)
        for group in groups
        for continuation in group.item.continuations
    )


@pytest.mark.parametrize("form", ("split", "dense", "repeated"))
def test_the_gradient_depends_neither_on_the_budget_nor_on_the_form(ragged_case, form):
    expected, loss, count, _ = gradient(ragged_case, "repeated", HUGE)
    tight = smallest_budget(ragged_case[2])
    assert count == 1 and float(expected.norm()) > 0
    seen = set()
    for budget in (HUGE, 4 * tight, 2 * tight, tight + 9, tight):
        found, found_loss, count, _ = gradient(ragged_case, form, budget)
        assert float((found - expected).norm() / expected.norm()) < 1e-5, budget
        assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        seen.add(count)
    assert min(seen) == 1 and max(seen) >= 4, seen


@pytest.mark.parametrize("checkpointing", (False, True))
def test_a_prompt_run_once_for_several_microbatches_gives_the_same_gradient(ragged_case, checkpointing):
    expected, loss, _, _ = gradient(ragged_case, "repeated", HUGE)
    tight = smallest_budget(ragged_case[2])
    for budget in (tight, tight + 3):
        found, found_loss, _, passes = gradient(ragged_case, "split", budget, True, checkpointing)
        assert passes >= 1
        assert float((found - expected).norm() / expected.norm()) < 1e-5, budget
        assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)


def test_one_token_less_than_the_smallest_budget_is_refused(ragged_case):
    with pytest.raises(DataError, match="max_tokens_per_microbatch"):
        gradient(ragged_case, "dense", smallest_budget(ragged_case[2]) - 1)
