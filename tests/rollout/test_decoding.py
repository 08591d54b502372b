"""A prompt's keys once for its group, against transformers' own cache with the prompt repeated."""

import pytest
import torch

from tests.rollout.recorded_step import RecordedStep
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_policy, tiny_prompts
from tiercel.models.vision import VisionStore
from tiercel.rollout.captured import FixedDecoder
from tiercel.rollout.decoding import RepeatedDecoder, SharedDecoder
from tiercel.rollout.local import build_decoder

STEPS, GROUP = 12, 3
TAKES_NO_PADDING = {"qwen3_5", "qwen3_5_moe"}  # transformers' cache, on the right


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_those_of_a_repeated_cache_while_rows_leave(tiny_checkpoints, name, seed):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    prompts = tiny_prompts(policy.family) + tiny_prompts(policy.family)[1:2]
    generator = torch.Generator().manual_seed(seed)
    vision = VisionStore(policy, 0)
    decoders = [SharedDecoder(policy, vision), FixedDecoder(policy, vision, None)]
    decoders.append(FixedDecoder(policy, vision, RecordedStep))
    if name not in TAKES_NO_PADDING:
        decoders.insert(0, RepeatedDecoder(policy, vision))
    with torch.no_grad():
        expected, *found = [decoder.prefill(prompts, GROUP, STEPS) for decoder in decoders]
        for logits in found:
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        rows = len(prompts) * GROUP
        for step in range(STEPS):
            if step in (2, 5, 6, 9):
                kept = (torch.rand(rows, generator=generator) < 0.7).nonzero()[:, 0].tolist() or [0]
                for decoder in decoders:
                    decoder.keep(kept)
                rows = len(kept)
            ids = random_ids(policy.family, rows, generator)
            expected, *found = [decoder.step(ids) for decoder in decoders]
            assert expected.shape[0] == rows
            for logits in found:
                torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_prompt_whose_rows_have_all_left_is_forgotten(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    decoder = SharedDecoder(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    with torch.no_grad():
        decoder.prefill(prompts, GROUP, STEPS)
        decoder.step(torch.zeros(9, dtype=torch.int64))
        decoder.keep([0, 2])  # of the shortest prompt
    assert decoder.attention.lengths == [len(prompts[0].token_ids_P)]
    assert decoder.attention.prompt_keys[0].shape[2] == len(prompts[0].token_ids_P)
    assert decoder.attention.own_keys[0].shape[0] == 2


def test_a_model_that_cannot_share_is_decoded_plainly(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), SharedDecoder)
    policy.family.language_model(policy.model).config.layer_types = ["full_attention", "chunked_attention"]
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), RepeatedDecoder)
