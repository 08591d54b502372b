"""Qwen3.5: pictures, videos and positions of Qwen3-VL without DeepStack, and a decoder most of whose layers are delta
nets (delta_net.py).

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from tiercel.models.family import HuggingFaceModel
from tiercel.models.qwen3_vl import Qwen3VL
from tiercel.models.qwen_vl import Qwen2VL
from tiercel.types import EncodedImage


class Qwen35(Qwen3VL):
    """Knows Qwen3.5 without experts, which writes boxes in thousandths of each side."""

    name = "qwen3_5"
    serves = "Qwen3.5 without experts, such as `Qwen/Qwen3.5-4B`"
    special = "as `qwen3_vl` without DeepStack; three of four layers are delta nets, whose state branches"
    part_prefixes: ClassVar = Qwen2VL.part_prefixes

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        return Qwen2VL.vision_features(self, model, images)

    @property
    def feature_layers(self) -> int:
        return 1
