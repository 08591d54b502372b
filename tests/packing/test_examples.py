"""Answers that share the beginning of their prompts: where they are cut, and what a pair computes."""

from dataclasses import replace

import pytest
import torch

from tests.models.test_families import huggingface_inputs
from tests.packing.items import NINES, prompt
from tests.packing.test_trajectories import SHOWN
from tests.tiny_models import FAMILY_NAMES, random_ids, tiny_policy, tiny_prompts
from tiercel.algorithms.completions import lasts, lengths, sums
from tiercel.algorithms.preference import PAIR_LOSSES, PairInput, ranking_losses
from tiercel.algorithms.preference_sections import Dpo
from tiercel.models.layers.value_head import add_value_head
from tiercel.models.prompts import completion_positions
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.examples import all_items, conversation_item, example_groups
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import pack
from tiercel.packing.tree import groups_tree
from tiercel.types import EncodedConversation, EncodedImage, Example, ImagePlan


def conversation(asked, answer, index=0, pictures=""):
    """A prompt of these ids, an answer of which all is scored; one picture for each letter."""
    plan = ImagePlan(original_size=(8, 8), processed_size=(8, 8), grid=(1, 1, 1), token_count=1)
    images = tuple(EncodedImage(sha256=name, plan=plan, views=()) for name in pictures)
    start = replace(prompt(asked, index), images=images)
    return EncodedConversation(
        prompt=start,
        token_ids_L=torch.tensor(answer),
        positions_DL=completion_positions(start.positions_DP, len(answer)),
        is_scored_L=torch.ones(len(answer), dtype=torch.bool),
    )


def test_a_pair_has_its_prompt_once():
    pair = Example(conversations=tuple(conversation([1, 9, 2], answer, pictures="a") for answer in ([5, 6], [5, 7, 8])))
    (group,) = example_groups([pair], NINES)
    packed = pack(group.items, NINES)
    assert packed.token_ids_T.tolist() == [1, 9, 2, 5, 6, 5, 7, 8]
    assert packed.tree == groups_tree((3, 2, 3))
    assert [image.sha256 for image in packed.images] == ["a"]


def test_pictures_of_later_turns_belong_to_what_follows_the_prompt():
    item = conversation_item(conversation([1, 9], [5, 9, 6, 9], pictures="abc"), NINES)
    assert [image.sha256 for image in item.prompt.images] == ["a"]
    assert [image.sha256 for image in item.continuations[0].images] == ["b", "c"]
    assert len(conversation_item(conversation([1, 9], [5, 9, 6, 9], pictures="abc")).prompt.images) == 3


def random_pairs(family, seed):
    """Of a prompt without a picture, with one and with two: a pair, and a pair of another question of the same
    pictures."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for start in tiny_prompts(family):
        plans = [image.plan for image in start.images]
        for more in (0, 3):
            asked = torch.cat([start.token_ids_P, random_ids(family, more, generator)])
            positions = family.positions(asked, plans)
            own = replace(start, token_ids_P=asked, positions_DP=positions)
            answers = [random_ids(family, length, generator) for length in (4 + more, 7)]
            examples.append(
                Example(
                    conversations=tuple(
                        EncodedConversation(
                            prompt=own,
                            token_ids_L=answer_L,
                            positions_DL=completion_positions(positions, len(answer_L)),
                            is_scored_L=torch.ones(len(answer_L), dtype=torch.bool),
                        )
                        for answer_L in answers
                    )
                )
            )
    return examples


def plain_words(policy, each):
    """Logprobs (L, V) of all words at an answer's tokens, by transformers' own pass over the whole conversation."""
    family, item = policy.family, conversation_item(each)
    ids_T = torch.cat([each.prompt.token_ids_P, each.token_ids_L])
    inputs = huggingface_inputs(family, item.prompt, ids_T, list(SHOWN[each.prompt.index]))
    logits_TV = policy.model(**inputs).logits[0]
    logits_TV = logits_TV.index_fill(1, torch.tensor(family.placeholder_ids), -torch.inf)
    return logits_TV[len(each.prompt.token_ids_P) - 1 : -1].log_softmax(-1)


def plain(policy, each):
    """Logprobs of an answer by the same pass."""
    return plain_words(policy, each).gather(1, each.token_ids_L[:, None])[:, 0]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_packed_pair_equals_two_plain_passes(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    examples = random_pairs(policy.family, 3)
    conversations = [each for example in examples for each in example.conversations]
    made = example_groups(examples, policy.family)
    packed, vision = pack(all_items(made), policy.family), VisionStore(policy, 0)
    reference_B2 = -10 * torch.rand(len(examples), 2, generator=torch.Generator().manual_seed(1))

    def outcome(logprobs_N):
        owners_N, count = packed.continuation_of_N, packed.continuation_count
        pairs = PairInput(
            logprobs_B2=sums(logprobs_N, owners_N, count).view(-1, 2),
            reference_B2=reference_B2,
            lengths_B2=lengths(owners_N, count).view(-1, 2).float(),
            shift=0.0,
        )
        policy.model.zero_grad()
        PAIR_LOSSES["sigmoid"].compute(pairs, Dpo(loss="sigmoid")).mean().backward()
        gradients = [parameter.grad.flatten() for parameter in policy.trained_parameters().values()]
        return logprobs_N.detach(), torch.cat(gradients)

    expected_N, expected = outcome(torch.cat([plain(policy, each) for each in conversations]))
    for form in ("split", "dense", "repeated"):
        found_N, found = outcome(
            PackedPolicy(policy, form, False)(packed, vision.features(packed.images), 1.0).logprobs_N
        )
        assert float((found_N - expected_N).abs().max()) < 1e-4, form
        assert float((found - expected).norm() / expected.norm()) < 1e-5, form


def plain_value(policy, each):
    """The value of an answer: the state that predicts its last token, of transformers' own pass, times the head."""
    family, item, states = policy.family, conversation_item(each), []
    inputs = huggingface_inputs(
        family, item.prompt, torch.cat([each.prompt.token_ids_P, each.token_ids_L]), list(SHOWN[each.prompt.index])
    )
    hook = policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, given: states.append(given[0]))
    policy.model(**inputs)
    hook.remove()
    return states[0][0, -2] @ policy.model.value_head.weight


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_values_of_a_packed_pair_equal_two_plain_passes(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    add_value_head(policy.model)
    head = policy.model.value_head.weight
    head.data.normal_(generator=torch.Generator().manual_seed(2))
    head.requires_grad_(True)
    examples = random_pairs(policy.family, 3)
    made = example_groups(examples, policy.family)
    packed, vision = pack(all_items(made), policy.family), VisionStore(policy, 0)

    def outcome(values_C):
        policy.model.zero_grad()
        ranking_losses(values_C.view(-1, 2), torch.zeros(len(examples)), 0.01).mean().backward()
        gradients = [parameter.grad.flatten() for parameter in policy.trained_parameters().values()]
        return values_C.detach(), torch.cat(gradients)

    expected_C, expected = outcome(
        torch.stack([plain_value(policy, each) for example in examples for each in example.conversations])
    )
    for form in ("split", "dense", "repeated"):
        values_N = PackedPolicy(policy, form, False)(packed, vision.features(packed.images), 1.0).values_N
        found_C, found = outcome(lasts(values_N, packed.continuation_of_N))
        assert float((found_C - expected_C).abs().max()) < 1e-4, form
        assert float((found - expected).norm() / expected.norm()) < 1e-5, form
