"""Each family against Hugging Face's own code, on tiny random checkpoints in the real format."""

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from tests.packing.items import sampled_items
from tests.tiny_models import (
    FAMILY_NAMES,
    MIXED_PICTURES,
    QWEN_FAMILIES,
    counting_store,
    make_row,
    mixed_rows,
    noise_image,
)
from tiercel.config.schema import Lora, Model
from tiercel.errors import DataError
from tiercel.models.families.loading import load_family
from tiercel.models.policy import Policy, _add_adapter, load_weights
from tiercel.models.prompts import (
    completion_positions,
    conversation_length,
    encode_conversation,
    encode_prompt,
    prompt_length,
)
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams

PIXELS = ("pixel_values", "image_sizes", "batch_num_images", "image_position_ids")
FORMS = ("split", "flex", "dense", "repeated")


def policy_of(path, lora_noise: float = 0.0) -> Policy:
    family = load_family(Model(path=str(path), dtype="float32"))
    model = load_weights(family, torch.float32, torch.device("cpu"))
    peft = _add_adapter(family, model, Lora(rank=4, alpha=8), seed=0)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, lora_noise, generator=generator)
    return Policy(
        family=family,
        model=model,
        peft=peft,
        reference_adapter=None,
        compute_dtype=torch.float32,
        device=torch.device("cpu"),
    )


def prompts_of(family):
    return [
        encode_prompt(family, row, i, images, system=None, max_prompt_tokens=400)
        for i, (row, images) in enumerate(mixed_rows(family))
    ]


def items_of(family, generator):
    """Groups of 3 ragged random completions on text-only, one-image and two-image prompts."""
    vocabulary = family.vocabulary_size
    allowed = [i for i in range(vocabulary) if i not in family.placeholder_ids]
    items = []
    for prompt in prompts_of(family):
        continuations = []
        for length in (5, 1, 8):
            picks = torch.randint(len(allowed), (length,), generator=generator).tolist()
            continuations.append(
                Continuation(
                    token_ids_L=torch.tensor([allowed[i] for i in picks]),
                    positions_DL=completion_positions(prompt.positions_DP, length),
                    is_scored_L=torch.ones(length, dtype=torch.bool),
                )
            )
        items.append(PackItem(prompt=prompt, continuations=tuple(continuations)))
    return items


@contextmanager
def resizing_along_x_first():
    """Inside, Pillow resizes in the order that it had up to version 12, whichever it is; tiercel always does."""
    own = Image.Image.resize

    def resize(image, size, resample=None, box=None, reducing_gap=None):
        assert box is None and reducing_gap is None
        return own(own(image, (size[0], image.height), resample), size, resample)

    with patch.object(Image.Image, "resize", resize):
        yield


def huggingface_inputs(family, prompt, token_ids_T, pictures=None):
    """Return the inputs of the model's own forward pass for one sample, with pixels from its own image processor. The
    pictures are those of `mixed_rows` if none are given."""
    inputs = {"input_ids": token_ids_T[None], "attention_mask": torch.ones_like(token_ids_T)[None]}
    processor = family.checkpoint.image_processor
    if prompt.images and not family.name.startswith("qwen"):
        pictures = pictures or (MIXED_PICTURES[:1] if len(prompt.images) == 1 else MIXED_PICTURES[1:])
        more = {"crop_to_patches": True} if family.name == "internvl" else {}  # as its whole processor requires
        with resizing_along_x_first():
            pixels = processor(images=pictures, return_tensors="pt", **more)
        inputs |= {key: pixels[key] for key in PIXELS if key in pixels}
        if family.name.startswith("gemma"):
            name = "token_type_ids" if family.name == "gemma3" else "mm_token_type_ids"
            inputs[name] = family.is_placeholder(token_ids_T)[None].int()
    elif prompt.images:
        pictures = [image.views[0].permute(2, 0, 1) for image in prompt.images]
        inputs |= dict(processor(images=pictures, do_resize=False, return_tensors="pt"))
        inputs["mm_token_type_ids"] = family.is_placeholder(token_ids_T)[None].int()
    return inputs


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logprobs_equal_a_plain_forward_per_sample(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name], lora_noise=0.1)
    family = policy.family
    items = items_of(family, torch.Generator().manual_seed(5))
    packed = pack(items)
    features = VisionStore(policy, 0).features(packed.images)
    with torch.no_grad():
        found = {form: PackedPolicy(policy, form, False)(packed, features, 0.7).logprobs_N for form in FORMS}
        plain = []
        for item in items:
            for continuation in item.continuations:
                ids_T = torch.cat([item.prompt.token_ids_P, continuation.token_ids_L])
                logits = policy.model(**huggingface_inputs(family, item.prompt, ids_T)).logits[0] / 0.7
                logits[:, list(family.placeholder_ids)] = -torch.inf
                start = len(item.prompt.token_ids_P) - 1
                rows = logits[start:-1].log_softmax(-1)
                plain.append(rows.gather(1, continuation.token_ids_L[:, None])[:, 0])
    plain = torch.cat(plain)
    assert plain.std() > 0.1
    for logprobs in found.values():
        torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ("split", "dense"))
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_groups_logprobs_do_not_depend_on_its_neighbours_tokens(tiny_checkpoints, name, form):
    """Other tokens of the same number in a completion between two groups, and in a neighbouring completion."""
    policy = policy_of(tiny_checkpoints[name], lora_noise=0.1)
    items = items_of(policy.family, torch.Generator().manual_seed(5))
    packed = pack(items)
    start, stop = packed.tree.nodes[packed.ends_C[4]].span[0], packed.tree.nodes[packed.ends_C[5]].span[1]
    changed_ids = packed.token_ids_T.clone()
    changed_ids[start:stop] = changed_ids[start:stop].flip(0)
    assert not torch.equal(changed_ids, packed.token_ids_T)
    features, learner = VisionStore(policy, 0).features(packed.images), PackedPolicy(policy, form, False)
    with torch.no_grad():
        before = learner(packed, features, 1.0).logprobs_N
        after = learner(replace(packed, token_ids_T=changed_ids), features, 1.0).logprobs_N
    is_changed_N = torch.isin(packed.continuation_of_N, torch.tensor([4, 5]))  # of the second group
    assert torch.equal(before[~is_changed_N], after[~is_changed_N])
    assert not torch.equal(before[is_changed_N], after[is_changed_N])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_shared_prefix_gradient_equals_the_repeated_one(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name], lora_noise=0.1)
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(6)))
    features = VisionStore(policy, 0).features(packed.images)
    weights = torch.randn(len(packed.targets_N), generator=torch.Generator().manual_seed(7))
    gradients = {}
    for form in ("split", "dense", "repeated"):
        (PackedPolicy(policy, form, False)(packed, features, 1.0).logprobs_N * weights).sum().backward()
        gradients[form] = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
        policy.model.zero_grad()
    expected = gradients.pop("repeated")
    assert expected.norm() > 0
    for form, found in gradients.items():
        assert (found - expected).norm() / expected.norm() < 1e-5, form


@pytest.mark.parametrize("form", ("split", "dense", "repeated"))
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_gradient_checkpointing_changes_nothing(tiny_checkpoints, name, form):
    policy = policy_of(tiny_checkpoints[name], lora_noise=0.1)
    packed = pack(items_of(policy.family, torch.Generator().manual_seed(6)))
    gradients = []
    for checkpointing in (False, "selective", "full"):
        policy.model.zero_grad()
        features = VisionStore(policy, 0).features(packed.images)
        learner = PackedPolicy(policy, form, checkpointing).train()
        learner(packed, features, 1.0).logprobs_N.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()]))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_sampled_logprobs_are_the_learners(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name], lora_noise=0.1)
    prompts = prompts_of(policy.family)
    params = SamplingParams(group_size=4, min_new_tokens=2, max_new_tokens=12, temperature=0.8)
    vision = counting_store(policy, 0)
    groups = LocalSampler(policy, vision).sample(prompts, params, [100, 200, 300])
    packed = pack(sampled_items(groups))
    with torch.no_grad():
        learnt = PackedPolicy(policy, "split", False)(packed, vision.features(packed.images), 0.8).logprobs_N
    sampled = torch.cat([c.logprobs_L for group in groups for c in group.completions])
    torch.testing.assert_close(learnt, sampled, rtol=0, atol=1e-4)
    ids = torch.cat([c.token_ids_L for group in groups for c in group.completions])
    assert not torch.isin(ids, torch.tensor(policy.family.placeholder_ids)).any()
    ends = set(policy.family.checkpoint.end_token_ids)
    assert all(ends.isdisjoint(c.token_ids_L[:2].tolist()) for group in groups for c in group.completions)
    assert vision.policy.pictures == 3


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_placeholders_are_never_sampled_though_they_are_likeliest(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name])
    head = policy.model.get_output_embeddings()
    prompts = prompts_of(policy.family)
    params = SamplingParams(group_size=2, max_new_tokens=6, greedy=True)
    bias = torch.zeros(head.weight.shape[0])
    bias[list(policy.family.placeholder_ids)] = 1e4
    hook = head.register_forward_hook(lambda module, inputs, output: output + bias)
    groups = LocalSampler(policy, VisionStore(policy, 0)).sample(prompts, params, [0, 0, 0])
    hook.remove()
    ids = torch.cat([c.token_ids_L for group in groups for c in group.completions])
    assert not torch.isin(ids, torch.tensor(policy.family.placeholder_ids)).any()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_token_count_is_known_from_the_header(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    for size in ((84, 56), (30, 90), (200, 100), (56, 56), (113, 57)):
        plan = family.plan_image(size)
        image = family.encode_image(noise_image(*size, seed=3))
        assert image.plan == plan
        assert len(family.image_token_ids(plan)) == plan.token_count
        assert image.views[0].shape == (plan.processed_size[1], plan.processed_size[0], 3)


@pytest.mark.parametrize("size", ((31, 639), (690, 15420), (257, 27), (16, 16), (1, 1), (1, 199), (3000, 20)))
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_thin_and_tiny_pictures_are_planned_as_they_are_encoded(tiny_checkpoints, name, size):
    limits = {"max_pixels": 6272} if name in QWEN_FAMILIES else {}
    family = load_family(Model(path=str(tiny_checkpoints[name]), **limits))
    if name == "llava_onevision" and max(size) > 10 * min(size):  # its canvas would have no row of features
        with pytest.raises(DataError, match=f"image of {size[0]} x {size[1]} pixels"):
            family.plan_image(size)
        return
    plan = family.plan_image(size)
    image = family.encode_image(noise_image(*size, seed=3))
    assert image.plan == plan and plan.token_count >= 1
    assert len(family.image_token_ids(plan)) == plan.token_count


@pytest.mark.parametrize("size", ((2100, 10), (10, 2100), (201, 1)))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_a_picture_of_more_than_200_to_1_is_refused_with_its_size(tiny_checkpoints, name, size):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    with pytest.raises(DataError, match=f"image of {size[0]} x {size[1]} pixels") as caught:
        family.plan_image(size)
    assert caught.value.field == "images"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_vision_features_have_a_row_for_every_placeholder(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name])
    for prompt in prompts_of(policy.family):
        for image in prompt.images:
            layers = 3 if name.startswith("qwen3_vl") else 1  # DeepStack adds features of two layers
            assert policy.vision_features([image])[0].shape == (policy.family.feature_count(image.plan), 64 * layers)


@pytest.mark.parametrize("name", ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"))
def test_positions_equal_the_models_own(tiny_checkpoints, name):
    policy = policy_of(tiny_checkpoints[name])
    for prompt in prompts_of(policy.family):
        ids = prompt.token_ids_P[None]
        kinds = policy.family.is_placeholder(ids).int()
        grids = torch.tensor([image.plan.grid for image in prompt.images]) if prompt.images else None
        expected, _ = policy.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
        assert torch.equal(prompt.positions_DP, expected[:, 0])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_vision_token_in_the_users_text_is_refused(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    for token in family.tokenizer.convert_ids_to_tokens(family.placeholder_ids):
        row = make_row("bad", f"Where is {token} the seven?", 0)
        with pytest.raises(DataError) as error:
            encode_prompt(family, row, 0, [], system=None, max_prompt_tokens=100)
        assert error.value.field == "messages"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_long_prompt_is_refused_whole(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    row, images = mixed_rows(family)[1]
    with pytest.raises(DataError, match="max_prompt_tokens = 7"):
        encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=7)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_sft_scores_assistant_turns_and_their_end(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    row, images = mixed_rows(family)[1]
    conversation = encode_conversation(family, row, 0, images, system=None, max_prompt_tokens=400)
    prompt = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=400)
    assert torch.equal(conversation.prompt.token_ids_P, prompt.token_ids_P)
    assert bool(conversation.is_scored_L.all())
    plans = [image.plan for image in images]
    whole = len(conversation.prompt.token_ids_P) + len(conversation.token_ids_L)
    assert conversation_length(family, row, plans, None) == whole
    assert prompt_length(family, row, plans, None) == len(prompt.token_ids_P)
    decoded = family.tokenizer.decode(conversation.token_ids_L.tolist())
    assert decoded == "[1, 20, 30, 40]<|im_end|>"
    assert torch.equal(
        conversation.positions_DL,
        completion_positions(prompt.positions_DP, len(conversation.token_ids_L)),
    )
