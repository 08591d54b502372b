"""A prompt's keys once for its group, against transformers' own cache with the prompt repeated."""

import pytest
import torch

from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_policy, tiny_prompts
from tiercel.models.vision import VisionStore
from tiercel.rollout.captured import CapturedDecoder
from tiercel.rollout.decoding import RepeatedDecoder, SharedDecoder
from tiercel.rollout.local import LocalSampler, build_decoder
from tiercel.rollout.sampler import SamplingParams

STEPS, GROUP = 12, 3


@pytest.mark.parametrize("name", sorted(set(FAMILY_NAMES) - {"qwen3_5"}))  # its cache takes no padding on the right
@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_those_of_a_repeated_cache_while_rows_leave(tiny_checkpoints, name, seed):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    prompts = tiny_prompts(policy.family) + tiny_prompts(policy.family)[1:2]
    generator = torch.Generator().manual_seed(seed)
    decoders = [kind(policy, VisionStore(policy, 0)) for kind in (RepeatedDecoder, SharedDecoder)]
    decoders.append(CapturedDecoder(policy, VisionStore(policy, 0), called_through))
    with torch.no_grad():
        expected, *found = [decoder.prefill(prompts, GROUP, STEPS) for decoder in decoders]
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        rows = len(prompts) * GROUP
        for step in range(STEPS):
            if step in (2, 5, 6, 9):
                kept = (torch.rand(rows, generator=generator) < 0.7).nonzero()[:, 0]
                kept = kept if len(kept) else torch.tensor([0])
                for decoder in decoders:
                    decoder.keep(kept)
                rows = len(kept)
            ids = random_ids(policy.family, rows, generator)
            expected, *found = [decoder.step(ids) for decoder in decoders]
            assert expected.shape[0] == rows
            for logits in found:
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def called_through(step, token_ids_R):
    """In place of a CUDA graph: the same step, its input where a graph would have it."""
    held_R = token_ids_R.clone()
    return lambda ids_R: step(held_R.copy_(ids_R))


@pytest.mark.parametrize("patience", (0.3, 0.5, 1.0))
def test_rows_that_have_ended_may_stay(tiny_checkpoints, patience):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.3)
    params = SamplingParams(
        group_size=6,
        min_new_tokens=0,
        max_new_tokens=20,
        temperature=1.5,
        top_p=1.0,
        top_k=0,
        stop=("1",),
        greedy=False,
    )
    groups = []
    for kind in (SharedDecoder, CapturedDecoder):
        sampler = LocalSampler(policy, VisionStore(policy, 0))
        if kind is CapturedDecoder:
            sampler.decoder = CapturedDecoder(policy, VisionStore(policy, 0), called_through)
            sampler.decoder.patience = patience
        groups.append(sampler.sample(tiny_prompts(policy.family), params, [10, 20, 30]))
    found, expected = ([c.token_ids_L.tolist() for group in each for c in group.completions] for each in groups)
    assert found == expected
    assert len({len(ids) for ids in expected}) > 3


def test_a_prompt_whose_rows_have_all_left_is_forgotten(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    decoder = SharedDecoder(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    with torch.no_grad():
        decoder.prefill(prompts, GROUP, STEPS)
        decoder.step(torch.zeros(9, dtype=torch.int64))
        decoder.keep(torch.tensor([0, 2]))  # of the shortest prompt
    assert decoder.attention.lengths_B.tolist() == [len(prompts[0].token_ids_P)]
    assert decoder.attention.prompt_keys[0].shape[2] == len(prompts[0].token_ids_P)
    assert decoder.attention.own_keys[0].shape[0] == 2


def test_a_model_that_cannot_share_is_decoded_plainly(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), SharedDecoder)
    policy.family.language_model(policy.model).config.layer_types = ["full_attention", "sliding_attention"]
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), RepeatedDecoder)
