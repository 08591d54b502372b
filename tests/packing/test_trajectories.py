"""Completions with answers and pictures between their turns, against a plain forward pass of each whole sequence."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.float64 import all_in_float64, in_float64
from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, MIXED_PICTURES, noise_image, random_ids, tiny_policy, tiny_prompts
from tiercel.models.families.base import Family
from tiercel.models.policy import Policy
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.prefix import passes
from tiercel.packing.batch import AdvantageGroup, policy_units, totals_of
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.types import EncodedPrompt

PLAIN = "transformers' own"
TURNS = (5, 3, 7)  # tokens that are sampled in each turn
SHOWN = ((), MIXED_PICTURES[:1], MIXED_PICTURES[1:])  # with the prompts of `tiny_prompts`


def pictures_that_come_back(number: int, seed: int) -> list[Image.Image]:
    """Two of random sizes."""
    generator = torch.Generator().manual_seed(100 * seed + number)
    sizes = torch.randint(40, 130, (2, 2), generator=generator).tolist()
    return [noise_image(width, height, seed=10 * number + turn) for turn, (width, height) in enumerate(sizes)]


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
                trajectory(family, prompt, pictures_that_come_back(2 * number + sample, seed), generator)
                for sample in range(2)
            ),
        )
        for number, prompt in enumerate(tiny_prompts(family))
    ]


def plain_logprobs(policy: Policy, items: list[PackItem], seed: int) -> Tensor:
    """Of the scored tokens, each trajectory in a pass of its own."""
    family, found = policy.family, []
    for number, item in enumerate(items):
        for sample, each in enumerate(item.continuations):
            pictures = [*SHOWN[number], *pictures_that_come_back(2 * number + sample, seed)]
            prompt = replace(item.prompt, images=item.prompt.images + each.images)
            ids_T = torch.cat([item.prompt.token_ids_P, each.token_ids_L])
            inputs = huggingface_inputs(family, prompt, ids_T, pictures)
            inputs["pixel_values"] = inputs["pixel_values"].to(policy.compute_dtype)
            logits_TV = policy.model(**inputs).logits[0]
            logits_TV = logits_TV.index_fill(1, torch.tensor(family.placeholder_ids), -torch.inf)
            rows_LV = logits_TV[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)[each.is_scored_L]
            found.append(rows_LV.gather(1, each.token_ids_L[each.is_scored_L][:, None])[:, 0])
    return torch.cat(found)


def logprobs_after_prompts(policy: Policy, items: list[PackItem], weights_N: Tensor) -> Tensor:
    """Each prompt in a pass of its own, then each trajectory with its own pictures; leaves the gradient."""
    learner, vision, found = PackedPolicy(policy, "split", False), VisionStore(policy, 0), []
    of_items = weights_N.split([sum(int(each.is_scored_L.sum()) for each in item.continuations) for item in items])
    for item, item_weights_N in zip(items, of_items, strict=True):
        counts = [int(each.is_scored_L.sum()) for each in item.continuations]
        group = AdvantageGroup(
            item=item,
            numbers=tuple(range(len(counts))),
            advantages_G=torch.ones(len(counts)),
            sampler_logprobs=tuple(torch.zeros(count) for count in counts),
        )
        longest = max(len(each.token_ids_L) for each in item.continuations)
        budget = len(item.prompt.token_ids_P) + longest
        (unit,) = policy_units([group], totals_of([group]), "split", budget, may_run_prefix=True)
        assert len(unit.prefixes) == 1 and len(unit.batches) == 2
        parts = iter(item_weights_N.split(counts))
        for batch, features, prefix in passes(unit, learner.run_prefix, vision.features):
            part_N = next(parts)
            logprobs_N = learner(batch.packed, features, 1.0, prefix).logprobs_N
            (logprobs_N * part_N).sum().backward()
            found.append(logprobs_N.detach())
    return torch.cat(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Between a form of the learner and a plain forward pass: the largest of a logprob, and that of the gradient,
    relative to its size."""

    logprob: float
    gradient: float


def differences(policy: Policy, seed: int, reference: Policy) -> dict[str, Difference]:
    """Compare every form of a policy, and its plain forward pass, with the plain forward pass of another in float64,
    on six random trajectories."""
    items = items_of(policy.family, seed)
    packed, vision = pack(items), VisionStore(policy, 0)
    weights_N = torch.randn(len(packed.targets_N), generator=torch.Generator().manual_seed(seed + 1))
    assert len(packed.images) == 3 + 12

    def outcome(of: Policy, logprobs: Callable[[], Tensor], *, has_gradient: bool = False) -> tuple[Tensor, Tensor]:
        of.model.zero_grad()
        logprobs_N = logprobs()
        if not has_gradient:
            (logprobs_N * weights_N.to(logprobs_N)).sum().backward()
        gradients = [parameter.grad.flatten() for parameter in of.trained_parameters().values()]
        return logprobs_N.detach().double(), torch.cat(gradients).double()

    def of_form(form: str) -> Tensor:
        return PackedPolicy(policy, form, False)(packed, vision.features(packed.images), 1.0).logprobs_N

    found = {form: outcome(policy, partial(of_form, form)) for form in ("split", "dense", "repeated")}
    after_prompts = partial(logprobs_after_prompts, policy, items, weights_N)
    found["prompt run apart"] = outcome(policy, after_prompts, has_gradient=True)
    found[PLAIN] = outcome(policy, partial(plain_logprobs, policy, items, seed))
    with all_in_float64():
        expected_N, expected_gradient = outcome(reference, partial(plain_logprobs, reference, items, seed))
    return {
        name: Difference(
            logprob=float((logprobs_N - expected_N).abs().max()),
            gradient=float((gradient - expected_gradient).norm() / expected_gradient.norm()),
        )
        for name, (logprobs_N, gradient) in found.items()
    }


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_form_is_as_near_to_double_precision_as_a_plain_forward(tiny_checkpoints, name):
    """How much a plain pass in float32 rounds depends on the processor; a form may round as much."""
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    found = differences(policy, 3, in_float64(policy, tiny_checkpoints[name]))
    gradient = max(1e-5, 1.5 * found.pop(PLAIN).gradient)
    assert {form: each for form, each in found.items() if each.logprob > 1e-4 or each.gradient > gradient} == {}
