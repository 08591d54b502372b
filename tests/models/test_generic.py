"""Image-text models without a family of their own, against Hugging Face's own code, on tiny random checkpoints."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.generic_models import GENERIC, has_processor, save_generic_checkpoint
from tests.packing.items import sampled_items
from tests.tiny_models import make_row, noise_image, tiny_policy, tiny_prompts
from tiercel.config.schema import Model
from tiercel.errors import DataError, ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import completion_positions, encode_prompt, prompt_length
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.attention.split_and_dense import SplitAttention
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.forward_equivalence_check import check_forward_equivalence
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.rollout.local.engine import LocalSampler
from tiercel.rollout.sampler import SamplingParams

WITHOUT = ("llava", "llava_next", "aya_vision")
OF_TORCHVISION = ("idefics3", "mistral3", "pixtral", "lighton_ocr", "glm46v")  # their processors need it
NAMES = WITHOUT + tuple(
    pytest.param(name, marks=pytest.mark.skipif(not has_processor(name), reason="its processor needs torchvision"))
    for name in OF_TORCHVISION
)
SIZES = ((84, 56), (56, 90), (200, 100), (333, 47))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("generic")
    names = (*WITHOUT, *filter(has_processor, OF_TORCHVISION))
    return {name: save_generic_checkpoint(GENERIC[name], root / name) for name in names}


def items_of(policy, lengths=(5, 1, 8)) -> list[PackItem]:
    """Groups of ragged random completions on prompts without a picture, with one and with two."""
    generator = torch.Generator().manual_seed(5)
    items = []
    for prompt in tiny_prompts(policy.family):
        completions = [
            Continuation(
                token_ids_L=torch.randint(200, (length,), generator=generator),
                positions_DL=completion_positions(prompt.positions_DP, length),
                is_scored_L=torch.ones(length, dtype=torch.bool),
            )
            for length in lengths
        ]
        items.append(PackItem(prompt=prompt, continuations=tuple(completions)))
    return items


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_equal_a_plain_forward_per_sample_in_every_form(checkpoints, name):
    policy = tiny_policy(checkpoints[name], noise=0.1)
    items = items_of(policy)
    packed = pack(items)
    features = VisionStore(policy, 0).features(packed.images)
    plain = []
    with torch.no_grad():
        for item in items:
            for continuation in item.continuations:
                ids_T = torch.cat([item.prompt.token_ids_P, continuation.token_ids_L])
                logits = policy.model(**policy.family.plain_inputs(item.prompt, ids_T)).logits[0]
                logits[:, list(policy.family.placeholder_ids)] = -torch.inf
                rows = logits[len(item.prompt.token_ids_P) - 1 : -1].log_softmax(-1)
                plain.append(rows.gather(1, continuation.token_ids_L[:, None])[:, 0])
        expected = torch.cat(plain)
        assert expected.std() > 0.1
        for form in ("split", "flex", "dense", "repeated"):
            found = PackedPolicy(policy, form, False)(packed, features, 1.0).logprobs_N
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_shared_prefix_gradient_equals_the_repeated_one(checkpoints, name):
    policy = tiny_policy(checkpoints[name], noise=0.1)
    packed = pack(items_of(policy))
    features = VisionStore(policy, 0).features(packed.images)
    gradients = {}
    for form in ("split", "repeated"):
        PackedPolicy(policy, form, False)(packed, features, 1.0).logprobs_N.square().sum().backward()
        gradients[form] = torch.cat([p.grad.flatten() for p in policy.trained_parameters().values()])
        policy.model.zero_grad()
    assert (gradients["split"] - gradients["repeated"]).norm() / gradients["repeated"].norm() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_neighbours_tokens_change_no_bit(checkpoints, name):
    policy = tiny_policy(checkpoints[name], noise=0.1)
    items = items_of(policy, lengths=(4, 4))
    last = len(items[-1].continuations) * 4
    found = []
    for shift in (0, 1):
        first, *others = items
        swapped = [
            Continuation(
                token_ids_L=(c.token_ids_L + shift) % 200, positions_DL=c.positions_DL, is_scored_L=c.is_scored_L
            )
            for c in first.continuations
        ]
        packed = pack([PackItem(prompt=first.prompt, continuations=tuple(swapped)), *others])
        features = VisionStore(policy, 0).features(packed.images)
        with torch.no_grad():
            found.append(PackedPolicy(policy, "split", False)(packed, features, 1.0).logprobs_N[-last:])
    assert torch.equal(*found)


@pytest.mark.parametrize("name", NAMES)
def test_sampled_logprobs_are_the_learners(checkpoints, name):
    policy = tiny_policy(checkpoints[name], noise=0.1)
    assert check_forward_equivalence(policy).obstacle is None
    params = SamplingParams(group_size=3, min_new_tokens=2, max_new_tokens=6)
    vision = VisionStore(policy, 0)
    groups = LocalSampler(policy, vision).sample(tiny_prompts(policy.family), params, [1, 2, 3])
    packed = pack(sampled_items(groups))
    with torch.no_grad():
        learnt = PackedPolicy(policy, "split", False)(packed, vision.features(packed.images), 1.0).logprobs_N
    sampled = torch.cat([c.logprobs_L for group in groups for c in group.completions])
    torch.testing.assert_close(learnt, sampled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_token_count_and_ids_are_known_from_the_size(checkpoints, name):
    family = load_family(Model(path=str(checkpoints[name])))
    for size in SIZES:
        image = family.encode_image(noise_image(*size, seed=3))
        row = make_row("row", "<image>Where is the seven?", 1, None)
        prompt = encode_prompt(family, row, 0, [image], system=None, max_prompt_tokens=800)
        whole = family.processor(text=[prompt.text], images=[noise_image(*size, seed=3)], return_tensors="pt")
        assert prompt.token_ids_P.tolist() == whole["input_ids"][0].tolist()
        assert prompt_length(family, row, [family.plan_image(size)], None) == len(prompt.token_ids_P)


def test_a_picture_with_the_same_size_and_other_pixels_has_other_features(checkpoints):
    policy = tiny_policy(checkpoints["llava_next"])
    images = [policy.family.encode_image(noise_image(84, 56, seed)) for seed in (1, 2)]
    first, second = policy.vision_features(images)
    assert first.shape == second.shape and not torch.allclose(first, second)


def edited(checkpoint: Path, place: Path, **changes) -> Path:
    """Copy a checkpoint with other keys in its processor's config."""
    copy = Path(shutil.copytree(checkpoint, place))
    file = copy / "processor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return copy


@pytest.mark.parametrize("name", ("llava", "llava_next"))
def test_a_processor_with_another_patch_size_is_refused(checkpoints, tmp_path, name):
    spoilt = edited(checkpoints[name], tmp_path / "spoilt", patch_size=28)
    with pytest.raises(ModelError, match="did not pass its proof"):
        check_forward_equivalence(tiny_policy(spoilt))


def test_a_decoder_that_gets_no_features_is_refused(checkpoints, monkeypatch):
    policy = tiny_policy(checkpoints["llava"])
    monkeypatch.setattr(policy.family, "with_features", lambda embeddings, is_vision, features: embeddings)
    with pytest.raises(ModelError, match=r"differ from its own forward pass by .* it needs a family of its own"):
        check_forward_equivalence(policy)


def test_a_decoder_whose_tokens_see_later_ones_may_not_share(checkpoints, monkeypatch):
    from tiercel.packing import forward

    policy = tiny_policy(checkpoints["llava"])
    monkeypatch.setitem(forward.ATTENTIONS, "split", SeesAll)
    found = check_forward_equivalence(policy)
    assert found.obstacle.startswith("with a shared prompt its logprobs differ by")
    assert policy.family.sharing_obstacle(policy.family.language_model(policy.model).config) == found.obstacle


class SeesAll(SplitAttention):
    def __call__(self, layer, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=layer.scale, enable_gqa=True)


def test_the_processor_of_another_model_is_refused(tmp_path, checkpoints):
    copy = edited(checkpoints["llava"], tmp_path / "copy", processor_class="Blip2Processor")
    with pytest.raises(ModelError, match=r"Blip2Processor does not declare image_token|did not pass its proof"):
        load_family(Model(path=str(copy)))


@pytest.mark.skipif(not has_processor("idefics3"), reason="its processor needs torchvision")
def test_without_a_count_by_size_a_blank_picture_counts(checkpoints, monkeypatch):
    path = str(checkpoints["idefics3"])
    counted = [load_family(Model(path=path)).plan_image(size).token_count for size in SIZES]
    monkeypatch.delattr("transformers.Idefics3Processor._get_num_multimodal_tokens")
    assert [load_family(Model(path=path)).plan_image(size).token_count for size in SIZES] == counted


def test_the_token_at_the_start_of_a_text_comes_once(checkpoints, tmp_path):
    """The whole processor adds the token if the template does not."""
    copy = Path(shutil.copytree(checkpoints["llava"], tmp_path / "copy"))
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    start = content["added_tokens"][0]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": start["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            start["content"]: {"id": start["content"], "ids": [start["id"]], "tokens": [start["content"]]}
        },
    }
    file.write_text(json.dumps(content))
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"bos_token": start["content"]}))
    family = load_family(Model(path=str(copy)))  # its proof compares with the whole processor
    ids = encode_prompt(family, make_row("row", "Where", 0, None), 0, [], system=None, max_prompt_tokens=99).token_ids_P
    assert ids[0] == start["id"] and ids[1] != start["id"]


def test_parts_are_those_of_the_models_modules(checkpoints):
    family = load_family(Model(path=str(checkpoints["llava_next"])))
    assert family.part_of("model.vision_tower.embeddings.patch_embedding.weight") == "vision"
    assert family.part_of("model.multi_modal_projector.linear_1.weight") == "projector"
    assert family.part_of("model.language_model.layers.0.mlp.up_proj.weight") == "language"
    assert family.part_of("lm_head.weight") == "language"


def test_a_row_with_pixel_limits_is_refused(checkpoints):
    from tiercel.types import PixelLimits

    family = load_family(Model(path=str(checkpoints["llava"])))
    with pytest.raises(DataError, match="takes the sizes of images from the checkpoint's processor"):
        family.plan_image((84, 56), PixelLimits(most=3136))


def test_boxes_need_data_coordinates(checkpoints):
    path = str(checkpoints["llava"])
    assert load_family(Model(path=path)).coordinate_space is None
    assert load_family(Model(path=path), coordinates="unit").coordinate_space == "unit"
    assert load_family(Model(path=path)).coordinate_space is None  # what one family was given, another does not get


def test_a_family_that_documents_its_boxes_takes_no_other_space(tiny_checkpoints):
    with pytest.raises(ModelError, match=r"data\.coordinates: is unit, but qwen3_vl writes boxes in thousandths;"):
        load_family(Model(path=str(tiny_checkpoints["qwen3_vl"])), coordinates="unit")
