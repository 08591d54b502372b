"""A prompt's keys once for its group, against transformers' own cache with the prompt repeated."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from benchmarks.random_trees import short_pieces_shared, tree_rows
from tests.generic_models import TEXT_KEYS, Tiny, save_generic_checkpoint
from tests.rollout.recorded_step import RecordedStep
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_policy, tiny_prompts
from tiercel.errors import EnvironmentProblem
from tiercel.models.families.base import Family
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.tree import Node, PrefixTree
from tiercel.rollout.local import decoding, prefill
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.decoding import RepeatedDecoder, SharedDecoder
from tiercel.rollout.local.engine import build_decoder
from tiercel.rollout.local.paused_rows import ResumedTokens
from tiercel.rollout.local.prefill import prompt_tree
from tiercel.types import EncodedPrompt

STEPS, GROUP = 12, 3
TAKES_NO_PADDING = {"qwen3_5", "qwen3_5_moe"}  # transformers' cache, on the right


@pytest.fixture(scope="module")
def policies(tiny_checkpoints) -> dict[str, Policy]:
    """A policy of each family, which decoders only read."""
    return {name: tiny_policy(tiny_checkpoints[name], noise=0.1) for name in FAMILY_NAMES}


@pytest.fixture(scope="module")
def side_by_side(policies) -> Callable[[str, int], list[Tensor]]:
    """Logits after prompts that were run side by side, and those of three more tokens, by family and seed."""

    @cache
    def logits(name: str, seed: int) -> list[Tensor]:
        policy = policies[name]
        prompts = [row.prompt for row in tree_rows(policy.family, seed)]
        padded, generator = SharedDecoder(policy, VisionStore(policy, 0)), torch.Generator().manual_seed(seed)
        with torch.no_grad(), short_pieces_shared(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoding, "prompt_tree", lambda prompts, family: None)
            found = [padded.prefill(prompts, GROUP, 4).clone()]
            for _ in range(3):
                ids_R = random_ids(policy.family, len(prompts) * GROUP, generator)
                found.append(padded.step(ids_R).clone())
        return found

    return logits


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_logits_equal_those_of_a_repeated_cache_while_rows_leave(policies, name, seed):
    policy = policies[name]
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


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shortest", (1, 16, prefill.SHORTEST_LEVEL))
def test_prompts_that_begin_alike_are_run_once(policies, side_by_side, monkeypatch, name, seed, shortest):
    """Questions of the same pictures: logits, and what later tokens read, as if the prompts were run side by side."""
    monkeypatch.setattr(prefill, "SHORTEST_LEVEL", shortest)
    policy = policies[name]
    prompts = [row.prompt for row in tree_rows(policy.family, seed)]
    decoder = SharedDecoder(policy, VisionStore(policy, 0))
    expected_BV, *later = side_by_side(name, seed)
    with torch.no_grad(), short_pieces_shared():
        tree = prompt_tree(prompts, policy.family)
        torch.testing.assert_close(decoder.prefill(prompts, GROUP, 4), expected_BV, rtol=0, atol=1e-4)
        generator = torch.Generator().manual_seed(seed)
        for expected_RV in later:
            ids_R = random_ids(policy.family, len(prompts) * GROUP, generator)
            torch.testing.assert_close(decoder.step(ids_R), expected_RV, rtol=0, atol=1e-4)
    length = sum(len(prompt.token_ids_P) for prompt in prompts)
    assert tree.laid.tree.length < 0.8 * length and len(tree.laid.tree.levels) >= 2
    assert (len(tree.decoded.tree.nodes) == len(tree.laid.tree.nodes)) == (shortest == 1)


def test_short_nodes_are_read_as_parts_of_their_children():
    """A root of 5 tokens; below it A (2), with children of 3 and 1, and B (1), with which a prompt ends, and its child
    of 2. Only A is short, has children and ends no prompt."""
    spans = [(0, 5), (5, 7), (7, 10), (10, 11), (11, 12), (12, 14)]
    tree = PrefixTree(nodes=tuple(map(Node, spans, (None, 0, 1, 1, 0, 4))))
    found = prefill.without_short_nodes(tree, [2, 3, 4, 5], shortest=3)
    assert [node.span for node in found.tree.nodes] == [(0, 5), (5, 10), (10, 13), (13, 14), (14, 16)]
    assert [node.parent for node in found.tree.nodes] == [None, 0, 0, 0, 3] and found.ends == (1, 2, 3, 4)
    assert [each.tolist() for each in found.places[1:]] == [[5, 6, 7, 8, 9], [5, 6, 10], [11], [12, 13]]


def followed(family: Family, prompt: EncodedPrompt, token_ids: list[int], start: int = 0) -> EncodedPrompt:
    """The prompt and text after it, or what comes after the first `start` tokens."""
    ids_P = torch.cat([prompt.token_ids_P, torch.tensor(token_ids, dtype=torch.int64)])
    positions_DP = family.positions(ids_P, [image.plan for image in prompt.images])
    return replace(
        prompt,
        token_ids_P=ids_P[start:],
        positions_DP=positions_DP[:, start:],
        images=() if start else prompt.images,
        picture_spans=() if start else prompt.picture_spans,
    )


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("kind", ("shared", "fixed", "captured"))
def test_rows_come_back_beside_rows_of_other_lengths(policies, name, kind):
    """Windows of 8 tokens begin in the prompts of some rows only. With deterministic kernels, new memory has NaN."""
    policy = policies[name]
    family, vision = policy.family, VisionStore(policy, 0)
    decoder = SharedDecoder(policy, vision)
    if kind != "shared":
        decoder = FixedDecoder(policy, vision, None if kind == "fixed" else RecordedStep)
    prompts = tiny_prompts(family)
    written: list[list[int]] = [[] for _ in range(6)]  # two rows of each prompt
    generator = torch.Generator().manual_seed(0)

    def written_by(number: int, count: int) -> Tensor:
        ids = random_ids(family, count, generator)
        written[number] += ids.tolist()
        return ids

    def step(rows: list[int]) -> None:
        logits = decoder.step(torch.cat([written_by(number, 1) for number in rows]))
        assert_as_whole(logits, rows)

    def assert_as_whole(logits: Tensor, rows: list[int]) -> None:
        whole = [followed(family, prompts[number // 2], written[number]) for number in rows]
        expected = SharedDecoder(policy, vision).prefill(whole, 1, 1)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)

    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            decoder.prefill(prompts, 2, 5, rows_return=True)
            step([0, 1, 2, 3, 4, 5])
            states = decoder.rows.take([0, 1, 3])
            decoder.keep([2, 4, 5])
            step([2, 4, 5])
            for number, count in ((0, 1), (1, 12), (3, 4)):
                written_by(number, count)
            rows = [
                ResumedTokens(
                    state=state,
                    tokens=followed(
                        family, prompts[number // 2], written[number], len(prompts[number // 2].token_ids_P) + 1
                    ),
                )
                for number, state in zip((0, 1, 3), states, strict=True)
            ]
            states, logits = decoder.run(rows)
            assert_as_whole(logits, [0, 1, 3])
            decoder.put(states, [3, 4, 0, 5, 1, 2])
            for _ in range(2):
                step([0, 1, 2, 3, 4, 5])
            decoder.keep([0, 2, 5])  # without the longest
            step([0, 2, 5])
            decoder.keep([0])
            states = decoder.rows.take([0])
            decoder.keep([])
            written_by(0, 2)
            start = len(prompts[0].token_ids_P) + states[0].length
            tokens = followed(family, prompts[0], written[0], start)
            states, _ = decoder.run([ResumedTokens(state=states[0], tokens=tokens)])
            decoder.put(states, [0])
            step([0])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_prompt_whose_rows_have_all_left_is_forgotten(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    decoder = SharedDecoder(policy, VisionStore(policy, 0))
    prompts = tiny_prompts(policy.family)
    with torch.no_grad():
        decoder.prefill(prompts, GROUP, STEPS)
        decoder.step(torch.zeros(9, dtype=torch.int64))
        decoder.keep([0, 2])  # of the shortest prompt
    (level,) = decoder.attention.levels
    assert level.lengths == (len(prompts[0].token_ids_P),)
    assert level.held[0][0].shape[2] == len(prompts[0].token_ids_P)
    assert decoder.attention.own_tokens[0][0].shape[0] == 2


def test_a_model_that_cannot_share_is_decoded_plainly(tiny_checkpoints):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), SharedDecoder)
    policy.family.language_model(policy.model).config.layer_types = ["full_attention", "chunked_attention"]
    assert isinstance(build_decoder(policy, VisionStore(policy, 0)), RepeatedDecoder)


def test_layers_that_keep_more_than_keys_and_values_are_refused(tmp_path):
    keys = TEXT_KEYS | {"layer_types": ["conv", "full_attention"]}
    tiny = Tiny(model="Lfm2ForCausalLM", config="Lfm2Config", keys=keys)
    policy = tiny_policy(save_generic_checkpoint(tiny, tmp_path / "lfm2"))
    words = r"the local engine cannot sample from .*lfm2: its layers have conv, and .*; set rollout.engine: vllm"
    with pytest.raises(EnvironmentProblem, match=words):
        build_decoder(policy, VisionStore(policy, 0))
