"""The decoder of an accelerator: memory and captured steps that outlast a batch, and rows that have ended but stay."""

from dataclasses import replace

import pytest
import torch

from tests.rollout.recorded_step import RecordedStep
from tests.rollout.test_local import PARAMS, likelier_end
from tests.tiny_models import move_adapter, tiny_policy, tiny_prompts
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.engine import LocalSampler, decoding_weights
from tiercel.rollout.local.static_cache import BatchSize
from tiercel.types import Group

SEEDS = [100, 200, 300]


@pytest.fixture
def policy(tiny_checkpoints) -> Policy:
    return tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.3)


def sampler_of(policy: Policy, capture=RecordedStep) -> LocalSampler:
    """The local engine as on a GPU, whose memory and graphs stay after a rollout."""
    sampler = LocalSampler(policy, VisionStore(policy, 0))
    sampler.decoder = FixedDecoder(policy, VisionStore(policy, 0), capture)
    sampler.weights = decoding_weights(policy, sampler.decoder, None)
    sampler.kept_bytes = 10**9
    return sampler


def tokens(groups: tuple[Group, ...]) -> list[list[int]]:
    return [completion.token_ids_L.tolist() for group in groups for completion in group.completions]


@pytest.mark.parametrize("look_every", (1, 3, 8, 50))
@pytest.mark.parametrize("stop", ((), ("1",)))
def test_rows_that_have_ended_may_stay(policy, look_every, stop):
    params = replace(PARAMS, group_size=6, max_new_tokens=20, temperature=1.5, stop=stop)
    expected = LocalSampler(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    sampler = sampler_of(policy)
    sampler.look_every = look_every
    with likelier_end(policy, 2.0):
        expected, found = (each.sample(prompts, params, SEEDS) for each in (expected, sampler))
    assert tokens(found) == tokens(expected)
    assert len({len(ids) for ids in tokens(expected)}) > 3
    for group, same in zip(found, expected, strict=True):
        for completion, other in zip(group.completions, same.completions, strict=True):
            assert completion.is_truncated == other.is_truncated
            torch.testing.assert_close(completion.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)


def test_no_token_is_decoded_after_the_look_that_finds_all_ended(policy, monkeypatch):
    steps = []
    step = FixedDecoder.step
    monkeypatch.setattr(FixedDecoder, "step", lambda self, ids_R: (steps.append(len(ids_R)), step(self, ids_R))[1])
    sampler = sampler_of(policy, None)
    sampler.look_every = 4
    with likelier_end(policy, 1e4):  # each row ends with its first token
        groups = sampler.sample(tiny_prompts(policy.family), replace(PARAMS, max_new_tokens=20), SEEDS)
    assert tokens(groups) == [[policy.family.tokenizer.eos_token_id]] * 12
    assert steps == [12] * 3  # tokens 2 to 4


@pytest.mark.parametrize("name", ("qwen2_5_vl", "qwen3_5"))
def test_the_next_batch_finds_memory_and_captured_steps(tiny_checkpoints, name, monkeypatch):
    monkeypatch.setattr(RecordedStep, "captures", 0)
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    sampler, plain = sampler_of(policy), LocalSampler(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    for round, chosen in enumerate((prompts, prompts[::-1], prompts[:1] * 3)):
        found, expected = (each.sample(chosen, PARAMS, SEEDS) for each in (sampler, plain))
        assert tokens(found) == tokens(expected)
        if round == 0:
            memory, captures = sampler.decoder.memory, RecordedStep.captures
        move_adapter(policy, 0.1, seed=round)  # the optimiser's update, in place
    assert sampler.decoder.memory is memory
    assert RecordedStep.captures == captures == 1


def test_a_larger_batch_gets_other_memory(policy):
    sampler = sampler_of(policy)
    prompts = tiny_prompts(policy.family)
    sampler.sample(prompts[:1], PARAMS, SEEDS[:1])
    memory = sampler.decoder.memory
    plain = LocalSampler(policy, VisionStore(policy, 0))
    found, expected = (each.sample(prompts, PARAMS, SEEDS) for each in (sampler, plain))
    assert tokens(found) == tokens(expected)
    assert sampler.decoder.memory is not memory


def test_other_weights_are_captured_anew(policy):
    sampler, plain = sampler_of(policy), LocalSampler(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    sampler.sample(prompts, PARAMS, SEEDS)
    for change in (replace_weights, lambda policy: policy.peft.base_model.disable_adapter_layers()):
        change(policy)
        found, expected = (each.sample(prompts, PARAMS, SEEDS) for each in (sampler, plain))
        assert tokens(found) == tokens(expected)


def replace_weights(policy: Policy) -> None:
    """Move the head's weights to another place in memory."""
    head = policy.model.get_output_embeddings()
    head.weight.data = head.weight.data.flip(0).contiguous()


def test_memory_that_is_too_large_to_stay_is_freed(policy):
    sampler = sampler_of(policy)
    sampler.sample(tiny_prompts(policy.family), PARAMS, SEEDS)
    held = sampler.decoder.held_bytes
    heads, size, layers = 2, 16, 2
    rows, prompt_tokens = 3 * PARAMS.group_size, 3 * 256
    in_layers = 2 * 4 * layers * heads * size * (prompt_tokens + rows * PARAMS.max_new_tokens)
    assert in_layers <= held < in_layers + 1000  # and counters
    sampler.kept_bytes = held - 1
    sampler.sample(tiny_prompts(policy.family), PARAMS, SEEDS)
    assert sampler.decoder.held_bytes == 0 and sampler.decoder.memory is None and not sampler.decoder.steps


def test_numbers_of_rows_are_halves_of_the_first(policy):
    decoder = FixedDecoder(policy, VisionStore(policy, 0), None)
    decoder.first_rows = 100
    assert [decoder.rows_for(rows) for rows in (100, 51, 50, 26, 25, 14, 13, 8, 1)] == [
        100,
        100,
        50,
        50,
        25,
        25,
        13,
        13,
        13,
    ]
    decoder.first_rows = 3
    assert decoder.rows_for(1) == 3


def test_room_by_hand():
    room = BatchSize(prompts=4, prompt_tokens=257, group_size=8, new_tokens=20)
    assert room.rows == 32
    assert room.rounded() == replace(room, prompt_tokens=512)
    for key in ("prompts", "prompt_tokens", "group_size", "new_tokens"):
        larger = replace(room, **{key: getattr(room, key) + 1})
        assert larger.holds(room) and not room.holds(larger)
    assert room.holds(room)


def test_a_step_that_cannot_be_captured_is_decoded_without(policy):
    def refused(step, token_ids_R, beside):
        raise RuntimeError("operation not permitted when stream is capturing")

    sampler = sampler_of(policy, refused)
    plain = LocalSampler(policy, VisionStore(policy, 0))
    with pytest.warns(RuntimeWarning, match="without a CUDA graph"):
        found = sampler.sample(tiny_prompts(policy.family), PARAMS, SEEDS)
    assert tokens(found) == tokens(plain.sample(tiny_prompts(policy.family), PARAMS, SEEDS))
