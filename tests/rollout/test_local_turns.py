"""Trajectories of the local engine: against a prefill of the whole history before each turn, and by their schedule."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.float64 import all_in_float64, in_float64
from tests.models.test_families import huggingface_inputs
from tests.rollout.recorded_step import RecordedStep
from tests.rollout.scripted_dialogues import LIMITS, ScriptedDialogues, observation, with_pictures
from tests.rollout.test_local import PARAMS, likelier_end, tokens
from tests.tiny_models import FAMILY_NAMES, counting_store, tiny_policy, tiny_prompts
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local import decoding, engine
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.decoding import BaseDecoder, SharedDecoder
from tiercel.rollout.local.engine import LocalSampler, decoding_weights
from tiercel.types import Completion, Group

SEEDS = [100, 200, 300]
TURNS = replace(PARAMS, group_size=3, max_new_tokens=60, temperature=1.3)
WINDOW = 36
WITH_STATES = ("qwen3_5", "qwen3_5_moe")  # float32 itself errs by 1e-5 in these tiny models, so float64 is compared
CAPTURED = ("qwen2_5_vl", "qwen3_5", "gemma4")  # also in an accelerator's memory: plain attention, states, windows


@pytest.fixture(scope="module")
def policies(tiny_checkpoints) -> dict[str, Policy]:
    policies = {name: tiny_policy(tiny_checkpoints[name], noise=0.1) for name in FAMILY_NAMES}
    for name in ("gemma3", "gemma4"):  # some rows see a part of their prompt, others none, next to each other
        widen_windows(policies[name])
    return policies


def widen_windows(policy: Policy) -> None:
    decoder = policy.family.language_model(policy.model)
    decoder.config.sliding_window = WINDOW
    for module in decoder.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = WINDOW


@pytest.fixture
def policy(policies) -> Policy:
    return policies["qwen2_5_vl"]


class Repeating:
    """A decoder whose rows cannot come back, so that all tokens of a row are computed again before each turn."""

    def __init__(self, policy: Policy, vision: VisionStore | None = None):
        self.decoder = SharedDecoder(policy, vision or VisionStore(policy, 0))

    def __getattr__(self, name: str):
        return getattr(self.decoder, name)

    def prefill(self, prompts, group_size: int, max_new_tokens: int, rows_return: bool = False) -> Tensor:
        return self.decoder.prefill(prompts, group_size, max_new_tokens)


def sampler_of(policy: Policy, decoder=None) -> LocalSampler:
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    if decoder is not None:
        sampler.decoder = decoder
        sampler.weights = decoding_weights(policy, decoder, None)
        sampler.kept_bytes = 10**9
    return sampler


def fixed(policy: Policy, capture=RecordedStep) -> FixedDecoder:
    return FixedDecoder(policy, VisionStore(policy, 0), capture)


def sampled(policy: Policy, sampler: LocalSampler, params=TURNS, dialogues=None, end_bias: float = 3.5):
    """Return the groups of the tiny prompts, with pictures in the answers unless `dialogues` are given."""
    dialogues = dialogues or ScriptedDialogues(with_pictures(policy.family))
    with likelier_end(policy, end_bias):
        return sampler.sample(tiny_prompts(policy.family), params, SEEDS, dialogues)


def flat(groups: tuple[Group, ...]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def assert_equal(found: tuple[Group, ...], expected: tuple[Group, ...], atol: float = 1e-5) -> None:
    assert tokens(found) == tokens(expected)
    for completion, same in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(completion.logprobs_L, same.logprobs_L, rtol=0, atol=atol)
        assert completion.is_truncated == same.is_truncated and completion.text == same.text
        ours, theirs = completion.trajectory, same.trajectory
        assert ours.turns == theirs.turns and ours.picture_spans == theirs.picture_spans
        assert torch.equal(ours.is_sampled_L, theirs.is_sampled_L)
        assert torch.equal(ours.positions_DL, theirs.positions_DL)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_rows_that_come_back_go_on_as_from_their_whole_history(policies, tiny_checkpoints, name):
    policy, is_wide = policies[name], name in WITH_STATES
    if is_wide:
        policy = in_float64(policy, tiny_checkpoints[name])
    with all_in_float64() if is_wide else nullcontext():
        expected = sampled(policy, sampler_of(policy, Repeating(policy)))
        assert len({len(completion.token_ids_L) for completion in flat(expected)}) > 4
        assert sum(len(completion.trajectory.turns) == 3 for completion in flat(expected)) >= 4
        for decoder in (None, fixed(policy)) if name in CAPTURED else (None,):
            assert_equal(sampled(policy, sampler_of(policy, decoder)), expected, atol=1e-11 if is_wide else 1e-5)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logprobs_are_those_of_a_plain_forward_pass_of_the_whole(policies, name, monkeypatch):
    policy = policies[name]
    family, encode, pictures = policy.family, policy.family.encode_image, {}

    def recorded(picture):
        image = encode(picture)
        pictures[image.sha256] = picture
        return image

    monkeypatch.setattr(family, "encode_image", recorded)
    groups = sampled(policy, sampler_of(policy), replace(TURNS, temperature=1.0), end_bias=3.5)
    for number, completion in enumerate(flat(groups)):
        prompt = groups[number // TURNS.group_size].prompt
        prompt = replace(prompt, images=prompt.images + completion.trajectory.images)
        ids_T = torch.cat([prompt.token_ids_P, completion.token_ids_L])
        shown = [pictures[image.sha256] for image in prompt.images]
        with torch.no_grad():
            logits_TV = policy.model(**huggingface_inputs(family, prompt, ids_T, shown)).logits[0]
        logits_TV[:, list(family.checkpoint.end_token_ids)] += 3.5
        logits_TV[:, list(family.placeholder_ids)] = -torch.inf
        logprobs_LV = logits_TV[len(prompt.token_ids_P) - 1 : -1].log_softmax(-1)
        expected_L = logprobs_LV.gather(1, completion.token_ids_L[:, None])[:, 0]
        is_sampled_L = completion.is_sampled_L
        torch.testing.assert_close(completion.sampled_logprobs, expected_L[is_sampled_L], rtol=0, atol=1e-4)
        assert bool((completion.logprobs_L[~is_sampled_L] == 0).all())


def test_a_batch_of_which_all_rows_leave_at_once(policy):
    params = replace(TURNS, group_size=1)
    with likelier_end(policy, 3.5):
        expected, found = (
            sampler.sample(
                tiny_prompts(policy.family)[:1], params, SEEDS[:1], ScriptedDialogues(with_pictures(policy.family))
            )
            for sampler in (sampler_of(policy, Repeating(policy)), sampler_of(policy))
        )
    assert len(found[0].completions[0].trajectory.turns) > 1
    assert_equal(found, expected)


def test_observed_tokens_in_several_passes(policies, monkeypatch):
    policy = policies["qwen3_5"]
    expected = sampled(policy, sampler_of(policy))
    monkeypatch.setattr(decoding, "MOST_SCORES", 1)
    assert_equal(sampled(policy, sampler_of(policy)), expected)


@contextmanager
def counted_tokens() -> Iterator[list[int]]:
    """The tokens of each pass through a decoder, without padding."""
    counts: list[int] = []
    padded, new = BaseDecoder.padded, BaseDecoder.new_hidden_states

    def counting_padded(self, prompts):
        counts.append(sum(len(prompt.token_ids_P) for prompt in prompts))
        return padded(self, prompts)

    def counting_new(self, token_ids_R, *given):
        counts.append(len(token_ids_R))
        return new(self, token_ids_R, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDecoder, "padded", counting_padded)
        patch.setattr(BaseDecoder, "new_hidden_states", counting_new)
        yield counts


def test_each_token_is_run_once_and_each_picture_is_computed_once(policy):
    store = counting_store(policy, 10**8)
    sampler = LocalSampler(policy, store)
    with counted_tokens() as counts:
        groups = sampled(policy, sampler)
    prompts = sum(len(group.prompt.token_ids_P) for group in groups)
    assert sum(counts) == prompts + sum(len(completion.token_ids_L) - 1 for completion in flat(groups))
    shown = [image.sha256 for group in groups for image in group.prompt.images]
    back = [image.sha256 for completion in flat(groups) for image in completion.trajectory.images]
    assert len(back) > len(set(back))  # several trajectories saw the same
    assert store.policy.pictures == len({*shown, *back})


def test_a_dialogue_that_only_listens_gives_the_bytes_of_plain_sampling(policies):
    for name in ("qwen2_5_vl", "gemma3", "qwen3_5"):
        policy = policies[name]
        dialogues = ScriptedDialogues(lambda number, text: None)
        params = replace(TURNS, min_new_tokens=2, top_p=0.9)
        found = sampled(policy, sampler_of(policy), params, dialogues)
        with likelier_end(policy, 3.5):
            plain = sampler_of(policy).sample(tiny_prompts(policy.family), params, SEEDS)
        assert tokens(found) == tokens(plain)
        for completion, same in zip(flat(found), flat(plain), strict=True):
            assert torch.equal(completion.logprobs_L, same.logprobs_L)
            assert (completion.text, completion.seed, completion.is_truncated) == (
                *(same.text, same.seed, same.is_truncated),
            )
        assert dialogues.asked == [(group.prompt.index, (0, 1, 2)) for group in plain]
        assert [dialogue.ended for dialogue in dialogues.opened] == [1] * 9


@contextmanager
def step_sizes() -> Iterator[list[int]]:
    """The rows of each step of the decoder."""
    sizes: list[int] = []
    step = SharedDecoder.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedDecoder, "step", lambda self, ids_R: (sizes.append(len(ids_R)), step(self, ids_R))[1])
        yield sizes


def test_the_bytes_do_not_depend_on_the_time_of_the_answers(policy):
    runs = []
    for delays in ((0.0,), (0.03, 0.0, 0.01, 0.05), (0.0, 0.08)):
        dialogues = ScriptedDialogues(with_pictures(policy.family), delays=delays)
        with step_sizes() as sizes:
            runs.append((sampled(policy, sampler_of(policy), TURNS, dialogues), sizes))
    (first, sizes), *others = runs
    assert any(after > before for before, after in pairwise(sizes))  # rows came back to others
    for groups, same_sizes in others:
        assert same_sizes == sizes
        assert_equal(groups, first, atol=0.0)


def test_rows_come_back_at_a_multiple_of_16_after_16_drawn_tokens(policy):
    """Each turn of the first row has one token; the only turn of the other has 50."""
    dialogues = ScriptedDialogues(lambda number, text: observation(policy.family, " the"))
    params = replace(TURNS, group_size=2, max_new_tokens=50)
    end = policy.family.tokenizer.eos_token_id
    real = engine.sample_turns
    draws = []

    def watched(settings, decoder, builders, logits_RV):
        def added(builder, add_turn):
            def add(ids, logprobs, *, is_truncated):
                draws.append((builder.seed, len(ids), len(sizes)))
                return add_turn(ids, logprobs, is_truncated=is_truncated)

            return add

        for builder in builders:
            builder.add_turn = added(builder, builder.add_turn)
        real(settings, decoder, builders, logits_RV)

    def ends_of_the_first(draw, logits_RV, seeds_R, positions_R, is_early_R):
        return torch.where(seeds_R == SEEDS[0], end, 5), torch.zeros(len(seeds_R))

    with pytest.MonkeyPatch.context() as patch, step_sizes() as sizes:
        patch.setattr(engine, "sample_turns", watched)
        patch.setattr("tiercel.rollout.token_sampling.TokenDraw.__call__", ends_of_the_first)
        sampler_of(policy).sample(tiny_prompts(policy.family)[:1], params, SEEDS[:1], dialogues)
    # it leaves at the 1st sampled token and is back for the 33rd; it leaves again and would be back for the 65th
    assert draws == [(100, 1, 0), (100, 1, 32), (101, 50, 49), (100, 1, 49)]
    assert sizes == [1] * 49


def test_elsewhere_rows_do_not_wait_for_a_slow_answer(policy):
    """The first answer comes only when all other trajectories have ended, and no look point waits for it."""
    expected = sampled(policy, sampler_of(policy))
    dialogues = ScriptedDialogues(with_pictures(policy.family))
    others_ended = threading.Event()
    sampler = sampler_of(policy)
    sampler.is_deterministic = False
    opened = dialogues.open

    def slow_first(prompt, samples):
        made = opened(prompt, samples)
        if prompt.index == 0:
            made[0].held_until = others_ended
        return made

    dialogues.open = slow_first
    steps = iter(range(10**6))
    sampler.beat = lambda: others_ended.set() if next(steps) == 60 else None
    assert_equal(sampled(policy, sampler, TURNS, dialogues), expected)


def test_min_new_tokens_counts_from_the_start_of_a_turn(policy):
    dialogues = ScriptedDialogues(lambda number, text: observation(policy.family, " the"))
    groups = sampled(policy, sampler_of(policy), replace(TURNS, min_new_tokens=2), dialogues, end_bias=1e4)
    for completion in flat(groups):
        assert [turn.token_count for turn in completion.trajectory.turns] == [3, 3, 3]


def test_a_turn_that_a_stop_string_ends_is_closed_before_the_answer(policy):
    """The end token is observed: the template writes it after each turn."""
    family = policy.family
    dialogues = ScriptedDialogues(lambda number, text: observation(family, " the") if number == 1 else None)
    stop = tuple("0123456789")
    groups = sampled(policy, sampler_of(policy), replace(TURNS, stop=stop), dialogues, end_bias=-1e4)
    stopped = [each for each in flat(groups) if len(each.trajectory.turns) == 2]
    assert len(stopped) > 4
    for completion in stopped:
        first = completion.trajectory.turns[0]
        assert first.text.endswith(stop)
        assert int(completion.token_ids_L[first.token_count]) == family.checkpoint.end_token_ids[0]
        assert not bool(completion.is_sampled_L[first.token_count])


@pytest.mark.parametrize("name", ("qwen2_5_vl", "gemma3"))
def test_memory_and_captured_steps_serve_turns_and_plain_sampling_in_turn(policies, name):
    policy = policies[name]
    sampler, shared = sampler_of(policy, fixed(policy)), sampler_of(policy)
    prompts = tiny_prompts(policy.family)
    long = replace(TURNS, max_new_tokens=400)  # memory that is not allocated again
    for _ in range(2):
        with likelier_end(policy, 3.5):
            plain, same = (each.sample(prompts, long, SEEDS) for each in (sampler, shared))
        assert tokens(plain) == tokens(same)
        assert_equal(sampled(policy, sampler), sampled(policy, shared))


def test_batches_count_the_tokens_of_whole_trajectories(policy, monkeypatch):
    expected = sampled(policy, sampler_of(policy))
    asked = []
    batches = engine._batches
    monkeypatch.setattr(engine, "_batches", lambda *given: asked.append(given[1:3]) or batches(*given))
    monkeypatch.setattr(engine, "TOKENS_IN_FLIGHT", 3 * (LIMITS.max_tokens + 100))
    assert_equal(sampled(policy, sampler_of(policy)), expected)
    assert asked == [(3, LIMITS.max_tokens)]
