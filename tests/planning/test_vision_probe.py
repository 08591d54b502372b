"""The vision tower in the plan, against the peak of its real code with other pictures than the plan's, and with
videos."""

import pytest
import torch
from PIL import Image

from benchmarks.published import save_config
from tests.planning.test_memory import recipe_of
from tiercel.models.layers.tower_attention import route_tower
from tiercel.packing.attention.block_mask import block_mask
from tiercel.planning.memory import Layout, Measured, RankMemory, rank_memory
from tiercel.planning.options import Subject, study
from tiercel.planning.probe import NOTHING, LinearBytes, VisionBytes, packed_case
from tiercel.planning.vision_probe import make_ready, measured_passes, vision_bytes, with_processor
from tiercel.types import EncodedImage, PixelLimits


def subject_of(directory, family: str, size: str, *, trains_tower: bool) -> Subject:
    recipe = recipe_of(save_config(family, size, directory), {"lora": None} if trains_tower else {})
    return study(recipe.model_copy(update={"freeze": () if trains_tower else recipe.freeze}), None)


def visuals(family) -> dict[str, list[EncodedImage]]:
    """Pictures of three sizes, and a video of 15 frames, whose last one is used twice."""
    pictures = [family.encode_image(Image.new("RGB", size)) for size in ((560, 336), (952, 952), (112, 224))]
    plan = family.plan_video((336, 448), 15, 2.0, PixelLimits(least=28 * 28, most=336 * 448))
    return {"pictures": pictures, "video": [family.encode_video([Image.new("RGB", (336, 448))] * 15, plan)]}


@pytest.mark.scale
@pytest.mark.parametrize("trains_tower", (False, True))
@pytest.mark.parametrize(("name", "size"), (("qwen2_5_vl", "3b"), ("qwen2_vl", "1.5b")))
def test_the_towers_bytes_are_within_a_tenth_of_the_real_code(tmp_path, name, size, trains_tower):
    subject = subject_of(tmp_path, name, size, trains_tower=trains_tower)
    planned = vision_bytes(subject)
    policy = subject.empty_policy(1)
    family = with_processor(subject.family, subject.config)
    route_tower(family.tower_of_spans(policy.model))
    make_ready(policy)
    for what, images in visuals(family).items():
        found, tokens = measured_passes(policy, family, images), sum(image.plan.token_count for image in images)
        for part in ("frozen", "kept", "trained") if trains_tower else ("frozen",):
            expected, real = getattr(planned, part).at(0, tokens), getattr(found, part)
            sizes = f"planned {expected / 1e9:.2f} GB, real {real / 1e9:.2f} GB, {expected / real - 1:+.1%}"
            print(f"{name} {what}, {part}: {sizes}")
            assert expected == pytest.approx(real, rel=0.1)


def per_token(size: float) -> LinearBytes:
    return LinearBytes(constant=7, per_layer=0, per_token=size, per_layer_token=0)


def learn_bytes(subject: Subject, *, tokens: int, on_gpu: bool = False, **vision: LinearBytes) -> RankMemory:
    """Return the plan's bytes if a token of the learner takes 100 bytes, and half of the tokens are those of images."""
    measured = Measured(learn=per_token(100), step=NOTHING, vision=VisionBytes(**vision), vision_share=0.5)
    layout = Layout(strategy="single", ranks=1, tokens=tokens, on_gpu=on_gpu)
    return rank_memory(subject.recipe, subject.sizes, measured, None, layout)


def test_a_frozen_tower_ends_before_the_learner_begins_and_a_trained_one_keeps_its_tensors(tmp_path):
    passes = "forward, backward and gradients"
    frozen = subject_of(tmp_path, "qwen2_5_vl", "3b", trains_tower=False)
    for size, expected in ((10, 100 * 1000 + 7), (300, 300 * 500 + 7)):
        assert learn_bytes(frozen, tokens=1000, frozen=per_token(size)).parts["learn"][passes] == expected
    trained = subject_of(tmp_path, "qwen2_5_vl", "3b", trains_tower=True)
    for kept, peak, expected in ((30, 40, 100 * 1000 + 30 * 500 + 14), (30, 400, 400 * 500 + 7)):
        memory = learn_bytes(trained, tokens=1000, kept=per_token(kept), trained=per_token(peak))
        assert memory.parts["learn"][passes] == expected


def test_the_block_mask_is_counted_as_it_is_made(tmp_path):
    subject = subject_of(tmp_path, "qwen2_5_vl", "3b", trains_tower=False)
    tokens = 6400
    mask = block_mask(packed_case(subject.composition, tokens, 3).tree, torch.device("cpu"))
    held = sum(value.nbytes for value in mask.as_tuple() if isinstance(value, torch.Tensor))
    planned = learn_bytes(subject, tokens=tokens, on_gpu=True).parts["learn"]["block mask"]
    assert planned == held == 16 * 50 * 51
    assert learn_bytes(subject, tokens=tokens).parts["learn"]["block mask"] == 0
