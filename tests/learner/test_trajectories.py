"""Completions with answers and pictures between their turns, against a plain forward pass of each whole sequence."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, MIXED_PICTURES, noise_image, random_ids, tiny_policy, tiny_prompts
from tiercel.learner.batch import AdvantageGroup, policy_units, totals_of
from tiercel.learner.layout import Continuation, PackItem, pack
from tiercel.learner.learner import Learner
from tiercel.models.family import Family
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.types import EncodedPrompt

TURNS = (5, 3, 7)  # tokens that are sampled in each turn
SHOWN = ((), MIXED_PICTURES[:1], MIXED_PICTURES[1:])  # with the prompts of `tiny_prompts`


def pictures_that_come_back(number: int) -> list[Image.Image]:
    return [noise_image(70 + 20 * number, 60, seed=number), noise_image(56, 90, seed=10 + number)]


def trajectory(
    family: Family, prompt: EncodedPrompt, pictures: list[Image.Image], generator: torch.Generator
) -> Continuation:
    """Three turns of random tokens, of random lengths, with a picture between words after each but the last."""
    images = [family.encode_image(picture) for picture in pictures]
    pieces, scored = [], []
    for turn, length in enumerate(TURNS):
        length += int(torch.randint(4, (), generator=generator))
        pieces.append(random_ids(family, length, generator))
        scored.append(torch.ones(length, dtype=torch.bool))
        if turn < len(images):
            shown = torch.tensor(family.image_token_ids(images[turn].plan))
            pieces += [random_ids(family, 2, generator), shown, random_ids(family, 3, generator)]
            scored.append(torch.zeros(5 + len(shown), dtype=torch.bool))
    ids_L = torch.cat(pieces)
    plans = [image.plan for image in (*prompt.images, *images)]
    start = len(prompt.token_ids_P)
    return Continuation(
        token_ids_L=ids_L,
        positions_DL=family.positions(torch.cat([prompt.token_ids_P, ids_L]), plans)[:, start:],
        is_scored_L=torch.cat(scored),
        picture_spans=family.picture_spans(ids_L),
        images=tuple(images),
    )


def items_of(family: Family, seed: int) -> list[PackItem]:
    """A group of two trajectories for each of a prompt without a picture, with one and with two."""
    generator = torch.Generator().manual_seed(seed)
    return [
        PackItem(
            prompt=prompt,
            continuations=tuple(
                trajectory(family, prompt, pictures_that_come_back(2 * number + sample), generator)
                for sample in range(2)
            ),
        )
        for number, prompt in enumerate(tiny_prompts(family))
    ]


def plain_logprobs(policy: Policy, items: list[PackItem]) -> Tensor:
    """Of the scored tokens, each trajectory in a pass of its own."""
    family, found = policy.family, []
    for number, item in enumerate(items):
        for sample, each in enumerate(item.continuations):
            pictures = [*SHOWN[number], *pictures_that_come_back(2 * number + sample)]
            prompt = replace(item.prompt, images=item.prompt.images + each.images)
            ids_T = torch.cat([item.prompt.token_ids_P, each.token_ids_L])
            logits_TV = policy.model(**huggingface_inputs(family, prompt, ids_T, pictures)).logits[0]
            logits_TV = logits_TV.index_fill(1, torch.tensor(family.placeholder_ids), -torch.inf)
            rows_LV = logits_TV[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)[each.is_scored_L]
            found.append(rows_LV.gather(1, each.token_ids_L[each.is_scored_L][:, None])[:, 0])
    return torch.cat(found)


def logprobs_after_prompts(policy: Policy, items: list[PackItem], weights_N: Tensor) -> Tensor:
    """Each prompt in a pass of its own, then each trajectory with its own pictures; leaves the gradient."""
    learner, vision, found = Learner(policy, "split", False), VisionStore(policy, 0), []
    of_items = weights_N.split([sum(int(each.is_scored_L.sum()) for each in item.continuations) for item in items])
    for item, item_weights_N in zip(items, of_items, strict=True):
        counts = [int(each.is_scored_L.sum()) for each in item.continuations]
        group = AdvantageGroup(
            item=item,
            advantages_G=torch.ones(len(counts)),
            sampler_logprobs=tuple(torch.zeros(count) for count in counts),
        )
        longest = max(len(each.token_ids_L) for each in item.continuations)
        budget = len(item.prompt.token_ids_P) + longest
        (unit,) = policy_units([group], totals_of([group]), "split", budget, may_run_prefix=True)
        assert unit.prefix is not None and len(unit.batches) == 2
        prefix = learner.run_prefix(unit.prefix, vision.features(unit.prefix.images))
        for batch, part_N in zip(unit.batches, item_weights_N.split(counts), strict=True):
            features = vision.features(batch.packed.images)
            logprobs_N = learner(batch.packed, features, 1.0, prefix).logprobs_N
            (logprobs_N * part_N).sum().backward()
            found.append(logprobs_N.detach())
        prefix.backward()
    return torch.cat(found)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logprobs_and_gradient_equal_a_plain_forward(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    items = items_of(policy.family, seed=3)
    packed, vision = pack(items), VisionStore(policy, 0)
    weights_N = torch.randn(len(packed.targets_N), generator=torch.Generator().manual_seed(4))

    def outcome(logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
        policy.model.zero_grad()
        (logprobs_N * weights_N).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
        return logprobs_N.detach(), gradient

    expected, gradient = outcome(plain_logprobs(policy, items))
    assert len(packed.images) == 3 + 12
    for form in ("split", "dense", "repeated"):
        found, own = outcome(Learner(policy, form, False)(packed, vision.features(packed.images), 1.0).logprobs_N)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert (own - gradient).norm() / gradient.norm() < 1e-5, form
    policy.model.zero_grad()
    found = logprobs_after_prompts(policy, items, weights_N)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    own = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
    assert (own - gradient).norm() / gradient.norm() < 1e-5
