"""Measurement of the vision tower's memory by running its own code, with weights that have shapes but no memory.

Its bytes are linear in the patches, whether of pictures or of videos, so small pictures are enough. The tower is never
in training mode, so no form of checkpointing applies to it.
"""

import gc
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from tiercel.models.families.base import Family
from tiercel.models.layers.tower_attention import route_tower
from tiercel.models.policy import Policy
from tiercel.planning.probe import LinearBytes, LiveBytes, ProbedModel, VisionBytes, fill_with_fakes, younger_garbage
from tiercel.types import EncodedImage

SIDE = 16  # of the measured picture, in patches before they are merged


class TowerPeaks(NamedTuple):
    """The bytes of the passes of some images. The fields correspond to those of VisionBytes."""

    frozen: int
    kept: int = 0
    trained: int = 0


def vision_bytes(probed: ProbedModel) -> VisionBytes:
    """Measure the tower with one picture and with two. Returns zeros for a family whose pictures are rows of a
    batch."""
    family, config = probed.family, probed.config
    if family.needs_proof:  # its processor is read from files, and its pictures are passed one by one
        return VisionBytes()
    policy = probed.empty_policy(1)
    if (tower := family.tower_of_spans(policy.model)) is None:
        return VisionBytes()
    route_tower(tower)
    prepared = with_processor(family, config)
    side = SIDE * config.vision_config.patch_size
    image = prepared.encode_image(Image.new("RGB", (side, side)))
    make_ready(policy)
    one, two = (measured_passes(policy, prepared, [image] * count) for count in (1, 2))
    tokens = image.plan.token_count

    def line(first: int, second: int) -> LinearBytes:
        slope = (second - first) / tokens
        return LinearBytes(constant=first - slope * tokens, per_layer=0, per_token=slope, per_layer_token=0)

    frozen, kept, trained = map(line, one, two)
    pixels = sum(view.numel() for view in image.views) / tokens
    return VisionBytes(frozen=frozen, kept=kept, trained=trained, pixels=pixels)


def with_processor(family: Family, config: Any) -> Family:
    """Return the family with an image processor that needs no file, because the sizes come from the config."""
    vision, chosen = config.vision_config, copy(family)
    processor = type(family).image_processor_class(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
    )
    chosen.checkpoint = replace(family.checkpoint, image_processor=processor)
    return chosen


def make_ready(policy: Policy) -> None:
    """Replace the tensors of a policy on torch's meta device by fake ones, with gradients as they are for every
    microbatch of an update but the first."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fill_with_fakes(policy.model)
    for parameter in policy.trained_parameters().values():
        parameter.grad = torch.empty_like(parameter)


def measured_passes(policy: Policy, family: Family, images: Sequence[EncodedImage]) -> TowerPeaks:
    """Measure the passes of images through the tower. Their grids stay real, because code reads them."""
    with younger_garbage(), LiveBytes() as live:
        with torch.no_grad(), policy.autocast():
            family.vision_features(policy.model, images)
        frozen = live.peak
        if policy.vision_is_frozen:
            return TowerPeaks(frozen)
        gc.collect()
        before = live.start_again()
        with policy.autocast():
            features = torch.cat(family.vision_features(policy.model, images))
        kept = live.now - before
        features.sum().backward()
        return TowerPeaks(frozen=frozen, kept=kept, trained=live.peak - before)
