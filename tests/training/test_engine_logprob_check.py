"""What the gate accepts and refuses. T tokens, H width of a hidden state, V words."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.random_trees import short_pieces_shared
from tests.tiny_models import tiny_policy, tiny_prompts
from tests.training.test_teacher_term import completion, passes_of
from tests.training.test_train_inference_mismatch import recipe_with
from tiercel.models.chat import second_turn
from tiercel.training.grpo.engine_logprob_check import EngineCheckLimits, Gap, _noise, smallest_scale, trainer_logprobs
from tiercel.types import Group

TOKENS, WIDTH, WORDS, RANK = 192, 64, 1000, 8


def logprobs(logits_TV: Tensor, ids_T: Tensor, temperature: float = 1.0) -> Tensor:
    return (logits_TV / temperature).log_softmax(-1).gather(1, ids_T[:, None])[:, 0]


def engines(scale: float = 1.0, temperature: float = 1.0) -> tuple[Gap, Tensor]:
    """The gap between a trainer and an engine that keep logits of up to 60 in bfloat16 and add up in another order, and
    by what the adapter, which the engine multiplies by `scale`, shifts the trainer's logprobs."""
    torch.manual_seed(0)
    hidden_TH, head_HV = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, WORDS)
    adapter_HV = 0.04 * torch.randn(WIDTH, RANK) @ torch.randn(RANK, WORDS)
    logits_TV = 34 + 2 * (hidden_TH @ head_HV) / WIDTH**0.5
    shift_TV = hidden_TH @ adapter_HV
    ids_T = (logits_TV + shift_TV).softmax(-1).multinomial(1)[:, 0]
    trainer_T = logprobs((logits_TV + shift_TV).bfloat16().float(), ids_T)
    order_TV = 0.05 * torch.randn(TOKENS, WORDS)  # what the layers' own rounding adds, less than a step of the logits
    engine_TV = (logits_TV + scale * shift_TV + order_TV).bfloat16().float()
    differences_T = (logprobs(engine_TV, ids_T, temperature) - trainer_T).abs()
    return Gap.of([("a", differences_T)]), (trainer_T - logprobs(logits_TV, ids_T)).abs()


def test_logits_kept_in_bfloat16_pass_although_a_token_is_beyond_the_tolerance():
    gap, _ = engines()
    assert gap.largest > 0.25  # refused by a limit on the largest difference
    assert EngineCheckLimits.of(recipe_with()).admit(gap)


@pytest.mark.parametrize("fault", ({"scale": 0.0}, {"scale": 0.5}, {"scale": 2.0}, {"temperature": 0.7}))
def test_an_engine_that_is_wrong_is_refused(fault):
    gap, shift_T = engines(**fault)
    assert float(shift_T.quantile(0.99)) > 2.0  # as far as the gate moves the adapter
    assert not EngineCheckLimits.of(recipe_with()).admit(gap)


def test_a_quantile_is_of_the_tokens_of_all_rows_and_the_row_is_that_of_the_largest():
    gap = Gap.of([("a", torch.zeros(100)), ("none", torch.empty(0)), ("b", torch.tensor([0.2] * 99 + [0.9]))])
    assert (gap.largest, gap.row) == (pytest.approx(0.9), "b")
    assert gap.high == pytest.approx(0.2) and gap.mean == pytest.approx((99 * 0.2 + 0.9) / 200)
    assert Gap.of([]) == Gap(mean=0.0, high=0.0, largest=0.0, row="(none)")


def test_limits_follow_the_tolerance_and_float32_holds_every_token_to_it():
    assert EngineCheckLimits.of(recipe_with()) == EngineCheckLimits(mean=0.125, high=0.5, largest=2.0)
    assert EngineCheckLimits.of(recipe_with(dtype="float32")) == EngineCheckLimits(mean=1e-3, high=1e-3, largest=1e-3)
    one = Gap.of([("a", torch.tensor([0.0] * 999 + [2e-3]))])
    assert not EngineCheckLimits.of(recipe_with(dtype="float32")).admit(one)


def test_each_weight_is_moved_by_its_own_scale_and_by_the_same_noise_whatever_the_others_scales():
    weights = [torch.zeros(1000), torch.ones(1000, dtype=torch.bfloat16)]
    both, last = _noise(0, [0.5, 0.25]), _noise(0, [0.0, 0.25])
    moved = [[change(weight) for weight in weights] for change in (both, last)]
    assert float(moved[0][0].std()) == pytest.approx(0.5, rel=0.1) and torch.equal(moved[1][0], weights[0])
    assert torch.equal(moved[0][1], moved[1][1]) and moved[0][1].dtype == torch.bfloat16
    assert float((moved[0][1] - 1).float().std()) == pytest.approx(0.25, rel=0.1)


@pytest.mark.parametrize(
    ("shift_of", "found"),
    [
        # doublings to 0.08 (6.4), then 0.06 (3.6), 0.05 (2.5) and 0.045 (2.025) of (0.04, 0.08]
        (lambda scale: 1000 * scale**2, (0.045, 2.025)),
        (lambda scale: 300 * scale, (0.01, 3.0)),  # the first is enough
        (lambda scale: min(scale, 0.04), (0.04, 0.04)),  # never enough: the first of the largest
        (lambda scale: 0.0, (0.01, 0.0)),
    ],
)
def test_the_smallest_noise_that_shifts_logprobs_enough_is_found(shift_of, found):
    assert smallest_scale(shift_of, 0.01, 2.0) == pytest.approx(found)


def test_a_second_turn_keeps_its_own_logprobs(tiny_checkpoints):
    """It has the index of the first. The first has 3 tokens, the second 5; each alone gives the same numbers."""
    policy = tiny_policy(tiny_checkpoints["qwen2_vl"], noise=0.1)
    first = tiny_prompts(policy.family)[1]
    prompts = (first, second_turn(policy.family, first))
    groups = [
        Group(prompt=prompt, completions=(completion(torch.arange(5, 5 + count)),), policy_version=0)
        for prompt, count in zip(prompts, (3, 5), strict=True)
    ]
    together = trainer_logprobs(passes_of(policy), groups)
    assert [len(each) for each in together] == [3, 5]
    for each, group in zip(together, groups, strict=True):
        torch.testing.assert_close(each, *trainer_logprobs(passes_of(policy), [group]), rtol=0, atol=1e-5)


def test_answers_of_several_servers_to_a_prompt_keep_their_own_logprobs(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_vl"], noise=0.1)
    prompt = tiny_prompts(policy.family)[1]
    groups = [
        Group(prompt=prompt, completions=(completion(torch.arange(*ids)),), policy_version=0)
        for ids in ((5, 9), (20, 26), (30, 34))
    ]
    together = trainer_logprobs(passes_of(policy), groups)
    for group, found in zip(groups, together, strict=True):
        (alone,) = trainer_logprobs(passes_of(policy), [group])
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-5)


def test_rows_of_a_picture_in_several_microbatches_keep_their_own_logprobs(tiny_checkpoints):
    """The third row asks about the picture of the first, so it goes through the learner before the second."""
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)
    bare, pictured, _ = tiny_prompts(policy.family)
    groups = [
        Group(
            prompt=replace(prompt, index=index),
            completions=(completion(torch.arange(5, 5 + count)),) * 2,
            policy_version=0,
        )
        for index, (prompt, count) in enumerate(zip((pictured, bare, pictured), (3, 5, 4), strict=True))
    ]
    tight = replace(passes_of(policy), max_tokens=len(pictured.token_ids_P) + 5)
    with short_pieces_shared():
        found = trainer_logprobs(tight, groups)
    for each, group in zip(found, groups, strict=True):
        torch.testing.assert_close(each, *trainer_logprobs(passes_of(policy), [group]), rtol=0, atol=1e-5)
