"""Qwen3.5: pictures, videos and positions of Qwen3-VL without DeepStack, and a decoder most of whose layers are delta
nets (delta_net.py)."""

from typing import Any, ClassVar

from torch import Tensor

from tiercel.models.qwen3_vl import Qwen3VL
from tiercel.models.qwen_vl import Qwen2VL


class Qwen35(Qwen3VL):
    """Knows Qwen3.5 without experts, which writes boxes in thousandths of each side."""

    name = "qwen3_5"
    serves = "Qwen3.5 without experts, such as `Qwen/Qwen3.5-4B`"
    special = "as `qwen3_vl` without DeepStack; three of four layers are delta nets, whose state branches"
    vllm = "in `make test-vllm`, in process and in bfloat16"
    part_prefixes: ClassVar = Qwen2VL.part_prefixes

    def tower_features(self, output: Any) -> Tensor:
        return Qwen2VL.tower_features(self, output)

    @property
    def feature_layers(self) -> int:
        return 1


class Qwen35Moe(Qwen35):
    """Knows Qwen3.5 with experts: only its decoder differs."""

    name = "qwen3_5_moe"
    serves = "Qwen3.5 with experts, such as `Qwen/Qwen3.5-35B-A3B`"
    special = "as `qwen3_5`; a router chooses the experts of each token, and one expert is shared by all"
    vllm = "not tried on a GPU; on a CPU vLLM has no kernels for adapters beside experts"
