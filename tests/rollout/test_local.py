"""The local engine on tiny models: what a sample depends on, how a completion ends, and what is reported about it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.models.test_families import huggingface_inputs
from tests.packing.items import picture
from tests.packing.items import prompt as bare_prompt
from tests.tiny_models import FAMILY_NAMES, tiny_policy, tiny_prompts
from tiercel.config.schema import Rollout
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local import engine
from tiercel.rollout.local.decoding import BaseDecoder
from tiercel.rollout.local.engine import LocalSampler, _batches
from tiercel.rollout.sampler import SamplingParams, greedy_params, sampling_params
from tiercel.types import Completion, EncodedPrompt, Group

PARAMS = SamplingParams(group_size=4, max_new_tokens=10)
GREEDY = replace(PARAMS, group_size=1, greedy=True)


@pytest.fixture(scope="module")
def policies(tiny_checkpoints) -> dict[str, Policy]:
    return {name: tiny_policy(tiny_checkpoints[name], noise=0.1) for name in FAMILY_NAMES}


@pytest.fixture
def policy(policies) -> Policy:
    return policies["qwen2_5_vl"]


def sample(policy: Policy, prompts, params: SamplingParams, seeds) -> tuple[Group, ...]:
    return LocalSampler(policy, VisionStore(policy, 0)).sample(prompts, params, seeds)


def one(policy: Policy, params: SamplingParams, seed: int = 0) -> Completion:
    """The first completion of the text-only prompt."""
    return sample(policy, tiny_prompts(policy.family)[:1], params, [seed])[0].completions[0]


def tokens(groups: tuple[Group, ...]) -> list[list[list[int]]]:
    return [[completion.token_ids_L.tolist() for completion in group.completions] for group in groups]


@contextmanager
def changed_logits(policy: Policy, change: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Logits (rows, V) of the decoder's n-th call inside, n from 0, are `change(n, logits)`."""
    calls = iter(range(10**6))
    plain = BaseDecoder.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDecoder, "logits", lambda self, hidden_RH: change(next(calls), plain(self, hidden_RH)))
        yield


def scripted(policy: Policy, pieces: list[str]):
    """The model writes these tokens, one after the other."""
    ids = policy.family.tokenizer.convert_tokens_to_ids([piece.replace(" ", "Ġ") for piece in pieces])
    assert None not in ids

    def change(call: int, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits).index_fill(1, torch.tensor(ids[call]), 1e4)

    return changed_logits(policy, change)


def likelier_end(policy: Policy, bias: float):
    """End tokens gain `bias` in every logit row."""
    added = torch.zeros(policy.family.vocabulary_size)
    added[list(policy.family.checkpoint.end_token_ids)] = bias
    return changed_logits(
        policy, lambda call, logits: logits + added[: logits.shape[1]].to(logits.device, non_blocking=True)
    )


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_sample_depends_on_nothing_beside_it(policies, name):
    policy = policies[name]
    prompts = tiny_prompts(policy.family)
    ends = set(policy.family.checkpoint.end_token_ids)
    with likelier_end(policy, 4.0):  # rows end at different steps and leave the batch
        together = sample(policy, prompts, PARAMS, [100, 200, 300])
        alone = [
            sample(policy, [prompt], PARAMS, [seed])[0] for prompt, seed in zip(prompts, (100, 200, 300), strict=True)
        ]
        single = replace(PARAMS, group_size=1)
        one_by_one = [
            [sample(policy, [prompt], single, [seed + i])[0].completions[0] for i in range(4)]
            for prompt, seed in zip(prompts, (100, 200, 300), strict=True)
        ]
        reversed_order = sample(policy, prompts[::-1], PARAMS, [300, 200, 100])[::-1]
    found = tokens(together)
    assert found == tokens(alone) == tokens(reversed_order)
    assert found == [[completion.token_ids_L.tolist() for completion in group] for group in one_by_one]
    flat = [ids for group in found for ids in group]
    assert len({len(ids) for ids in flat}) >= 3 and len({tuple(ids) for ids in flat}) >= 8
    assert any(ids[-1] in ends for ids in flat)
    for group, expected in zip(together, one_by_one, strict=True):
        for completion, same in zip(group.completions, expected, strict=True):
            torch.testing.assert_close(completion.logprobs_L, same.logprobs_L, rtol=0, atol=1e-4)


def test_sample_i_of_a_group_is_drawn_with_seed_plus_i(policy):
    prompt = tiny_prompts(policy.family)[:1]
    (group,) = sample(policy, prompt, PARAMS, [50])
    (later,) = sample(policy, prompt, PARAMS, [52])
    assert [completion.seed for completion in group.completions] == [50, 51, 52, 53]
    assert tokens((group,))[0][2:] == tokens((later,))[0][:2]
    assert tokens((group,))[0][0] != tokens((group,))[0][1]


def test_a_larger_group_begins_with_the_smaller(policy):
    prompts = tiny_prompts(policy.family)[:2]
    small = sample(policy, prompts, replace(PARAMS, group_size=2), [1, 2])
    large = sample(policy, prompts, replace(PARAMS, group_size=5), [1, 2])
    assert [group[:2] for group in tokens(large)] == tokens(small)


def test_splitting_by_tokens_in_flight_changes_nothing(policy, monkeypatch):
    prompts = tiny_prompts(policy.family) * 2
    expected = sample(policy, prompts, PARAMS, range(6))
    assert len(_batches(prompts, PARAMS.group_size, PARAMS.max_new_tokens)) == 1
    monkeypatch.setattr(engine, "TOKENS_IN_FLIGHT", 200)
    assert len(_batches(prompts, PARAMS.group_size, PARAMS.max_new_tokens)) > 2
    assert tokens(sample(policy, prompts, PARAMS, range(6))) == tokens(expected)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_greedy_is_the_argmax_of_a_plain_forward(policies, name):
    policy = policies[name]
    prompts = tiny_prompts(policy.family)
    params = replace(GREEDY, max_new_tokens=6, temperature=0.3)
    for group in sample(policy, prompts, params, [0, 0, 0]):
        ids = group.prompt.token_ids_P
        for token in group.completions[0].token_ids_L.tolist():
            with torch.no_grad():
                logits = policy.model(**huggingface_inputs(policy.family, group.prompt, ids)).logits[0, -1]
            logits[list(policy.family.placeholder_ids)] = -torch.inf
            assert token == int(logits.argmax())
            ids = torch.cat([ids, torch.tensor([token])])


def test_top_k_of_one_and_a_temperature_near_zero_are_greedy(policy):
    prompts = tiny_prompts(policy.family)
    greedy = tokens(sample(policy, prompts, GREEDY, [0, 0, 0]))
    for params in (replace(PARAMS, top_k=1), replace(PARAMS, top_p=1e-6), replace(PARAMS, temperature=1e-5)):
        found = tokens(sample(policy, prompts, params, [7, 8, 9]))
        assert found == [group * 4 for group in greedy]


@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_draws_and_logprobs_are_those_of_logits_over_temperature(policy, temperature):
    weights = torch.zeros(policy.family.vocabulary_size)
    weights[[10, 11, 12]] = torch.tensor([6.0, 7.0, 8.0])
    weights[list(policy.family.placeholder_ids)] = 9.0
    params = replace(PARAMS, group_size=2000, max_new_tokens=1, temperature=temperature)
    with changed_logits(policy, lambda call, logits: weights.expand_as(logits).clone()):
        (group,) = sample(policy, tiny_prompts(policy.family)[:1], params, [0])
    weights[list(policy.family.placeholder_ids)] = -torch.inf
    expected = (weights / temperature).log_softmax(-1)
    drawn = torch.cat([completion.token_ids_L for completion in group.completions])
    logprobs = torch.cat([completion.logprobs_L for completion in group.completions])
    torch.testing.assert_close(logprobs, expected[drawn])
    share = torch.bincount(drawn, minlength=len(weights))[[10, 11, 12]] / 2000
    torch.testing.assert_close(share, expected.exp()[[10, 11, 12]], rtol=0, atol=0.045)  # four standard errors


def test_logprobs_are_those_of_the_full_distribution_also_under_filters(policy):
    weights = torch.zeros(policy.family.vocabulary_size)
    weights[[10, 11]] = torch.tensor([3.0, 2.0])
    params = replace(PARAMS, max_new_tokens=1, top_k=2)
    with changed_logits(policy, lambda call, logits: weights.expand_as(logits).clone()):
        (group,) = sample(policy, tiny_prompts(policy.family)[:1], params, [0])
    weights[list(policy.family.placeholder_ids)] = -torch.inf
    for completion in group.completions:
        assert int(completion.token_ids_L) in (10, 11)
        torch.testing.assert_close(completion.logprobs_L, weights.log_softmax(-1)[completion.token_ids_L])


def test_an_end_token_ends_a_completion_and_is_not_in_its_text(policy):
    with scripted(policy, [" the", " seven", "<|im_end|>", " is"]):
        completion = one(policy, PARAMS)
    assert completion.text == " the seven"
    assert len(completion.token_ids_L) == len(completion.logprobs_L) == 3
    assert int(completion.token_ids_L[-1]) == policy.family.tokenizer.eos_token_id
    assert not completion.is_truncated


def test_a_completion_without_an_end_is_truncated(policy):
    with scripted(policy, [" the"] * 10):
        completion = one(policy, PARAMS)
    assert completion.text == " the" * 10
    assert completion.is_truncated


def test_an_end_at_the_last_place_is_not_truncated(policy):
    with scripted(policy, [" the", "<|im_end|>"]):
        completion = one(policy, replace(PARAMS, max_new_tokens=2))
    assert completion.text == " the"
    assert not completion.is_truncated


@pytest.mark.parametrize("params", (PARAMS, GREEDY), ids=("sampled", "greedy"))
@pytest.mark.parametrize("least", (0, 1, 3))
def test_end_tokens_are_masked_before_min_new_tokens(policy, params, least):
    with likelier_end(policy, 1e4):
        completion = one(policy, replace(params, min_new_tokens=least))
    is_end = torch.isin(completion.token_ids_L, torch.tensor(policy.family.checkpoint.end_token_ids))
    assert is_end.tolist() == [False] * least + [True]


@pytest.mark.parametrize(
    ("stop", "pieces", "text"),
    [
        (" seven", [" the", " seven", " is"], " the seven"),
        ("sev", [" the", " seven", " is"], " the seven"),  # inside a token: the whole token stays
        ("he sev", [" the", " seven", " is"], " the seven"),  # across tokens
        ("12", ["1", "2", "3"], "12"),
        ("12", ["3", "12", "3"], "312"),
        ("é", [" the", "Ã", "©", " is"], " theé"),  # a character of two byte tokens
        ("?", ["?", " is"], "?"),
        ("never", [" the", "<|im_end|>"], " the"),
    ],
)
def test_stop_strings(policy, stop, pieces, text):
    with scripted(policy, pieces):
        completion = one(policy, replace(PARAMS, stop=("absent", stop)))
    assert completion.text == text
    assert not completion.is_truncated


def test_a_stop_string_of_the_prompt_does_not_count(policy):
    with scripted(policy, ["?", "<|im_end|>"]):
        completion = one(policy, replace(PARAMS, stop=("seven?",)))
    assert completion.text == "?"


def test_rows_end_by_their_own_stop(policy):
    with likelier_end(policy, 2.0):
        free = sample(policy, tiny_prompts(policy.family)[:1], replace(PARAMS, group_size=6), [5])[0].completions
        middle = policy.family.tokenizer.decode(free[0].token_ids_L[3:4].tolist())
        stopped = sample(policy, tiny_prompts(policy.family)[:1], replace(PARAMS, group_size=6, stop=(middle,)), [5])[
            0
        ].completions
    for before, after in zip(free, stopped, strict=True):
        pieces = [policy.family.tokenizer.decode([token]) for token in before.token_ids_L.tolist()]
        length = next((i + 1 for i, piece in enumerate(pieces) if middle in piece), len(pieces))
        assert after.token_ids_L.tolist() == before.token_ids_L[:length].tolist()
    assert len(stopped[0].token_ids_L) <= 4


def test_groups_carry_the_version_that_was_loaded(policy):
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    sampler.load_policy(17, None)
    (group,) = sampler.sample(tiny_prompts(policy.family)[:1], GREEDY, [0])
    assert group.policy_version == 17
    assert sampler.sample([], GREEDY, []) == ()


def test_sampling_leaves_no_gradient_and_no_training_mode(policy):
    policy.model.train()
    completion = one(policy, PARAMS)
    assert not policy.model.training
    assert not completion.logprobs_L.requires_grad
    assert all(parameter.grad is None for parameter in policy.trained_parameters().values())


def of_lengths(*lengths: int) -> list[EncodedPrompt]:
    return [bare_prompt(range(length)) for length in lengths]


def test_batches_by_hand(monkeypatch):
    monkeypatch.setattr(engine, "TOKENS_IN_FLIGHT", 100)
    # two rows per prompt, each as wide as the longest prompt of its batch plus 5
    assert _batches(of_lengths(5, 5, 5, 5, 5, 5), 2, 5) == [[0, 1, 2, 3, 4], [5]]
    assert _batches(of_lengths(5, 20, 5, 5), 2, 5) == [[0, 1], [2, 3]]  # 6 rows of 25 would be too many
    assert _batches(of_lengths(5, 5, 30, 5), 2, 5) == [[0, 1], [2], [3]]  # and so would 4 rows of 35
    # a prompt that is too large goes alone, and its width does not affect those after it
    assert _batches(of_lengths(200, 5, 5, 5), 2, 5) == [[0], [1, 2, 3]]
    assert _batches([], 2, 5) == []


def test_questions_of_a_picture_are_in_one_batch_if_they_fit(monkeypatch):
    monkeypatch.setattr(engine, "TOKENS_IN_FLIGHT", 80)  # four prompts
    prompts = [
        replace(prompt, images=tuple(map(picture, shown)))
        for prompt, shown in zip(of_lengths(*[5] * 8), ["", "", "a", "a", "a", "b", "b", ""], strict=True)
    ]
    assert _batches(prompts, 2, 5) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _batches(prompts, 2, 5, True) == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert _batches(prompts[2:5] * 2, 2, 5, True) == [[0, 1, 2, 3], [4, 5]]  # too many of one picture


def test_params_of_a_recipe():
    rollout = Rollout(group_size=3, max_new_tokens=7, temperature=0.6, top_p=0.9, top_k=4, stop=("x",))
    drawn = SamplingParams(
        group_size=3, min_new_tokens=1, max_new_tokens=7, temperature=0.6, top_p=0.9, top_k=4, stop=("x",)
    )
    assert sampling_params(rollout) == drawn
    assert greedy_params(rollout) == SamplingParams(min_new_tokens=1, max_new_tokens=7, stop=("x",), greedy=True)


@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl", "gemma3"))
def test_drawn_tokens_without_a_text_decode_to_nothing(tiny_checkpoints, tmp_path, name):
    """Embeddings are padded beyond the tokenizer's words, and a model may draw such an id."""
    place = Path(shutil.copytree(tiny_checkpoints[name], tmp_path / "padded"))
    model = AutoModelForImageTextToText.from_pretrained(place, dtype=torch.float32)
    words = len(AutoTokenizer.from_pretrained(place))
    model.resize_token_embeddings(words + 40)
    model.save_pretrained(place)
    policy = tiny_policy(place)
    assert policy.family.vocabulary_size == words + 40
    (seven,) = policy.family.tokenizer.encode("7", add_special_tokens=False)[-1:]
    drawn = [seven, words, words + 39, seven, words + 7, policy.family.checkpoint.end_token_ids[0]]

    def change(call: int, logits: Tensor) -> Tensor:
        return torch.zeros_like(logits).index_fill(1, torch.tensor(drawn[call]), 1e4)

    with changed_logits(policy, change):
        found = one(policy, PARAMS)
    assert found.token_ids_L.tolist() == drawn and not found.is_truncated
    assert found.text.split() in (["77"], ["7", "7"]) and bool(found.logprobs_L.isfinite().all())
