"""Qwen3-VL and Qwen3.5, with the images and positions of Qwen2-VL; Qwen3-VL has DeepStack
(https://arxiv.org/abs/2406.04334)."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tiercel.models.families.base import HuggingFaceModel
from tiercel.models.families.qwen2_vl import PAIR, Qwen2VL
from tiercel.types import CoordinateSpace, ImagePlan


class Qwen3VL(Qwen2VL):
    """Qwen3-VL, which writes boxes in thousandths of each side."""

    name = "qwen3_vl"
    video_marker = "<|vision_start|><|video_pad|><|vision_end|>"
    serves = "Qwen3-VL without experts, such as `Qwen/Qwen3-VL-4B-Instruct`"
    special = "a token for 32 x 32 pixels; DeepStack: features of earlier vision layers for the first decoder layers"
    vllm = "in `make test-vllm`, in process and by server"
    coordinate_space: ClassVar[CoordinateSpace] = "thousandths"
    part_prefixes: ClassVar = {
        "vision": ("model.visual.",),
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
    }

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        """Return the tokens of an image or a video. In a video's grid, each layer has its time as text before it, and a
        start and an end token."""
        if plan.fps is None:
            return super().image_token_ids(plan)
        config = self.checkpoint.config
        layer = super().image_token_ids(replace(plan, grid=(1, *plan.grid[1:])))
        ids: list[int] = []
        for number in range(plan.grid[0]):
            first, last = PAIR * number, min(PAIR * number + PAIR, plan.frame_count) - 1
            seconds = (first / plan.fps + last / plan.fps) / 2
            ids += self.tokenizer(f"<{seconds:.1f} seconds>", add_special_tokens=False)["input_ids"]
            ids += [config.vision_start_token_id, *layer, config.vision_end_token_id]
        return ids

    def grid_times(self, plan: ImagePlan) -> list[list[int]]:
        return [[0]] * plan.grid[0]

    def tower_features(self, output: Any) -> Tensor:
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    def grid_inputs(self, tower: HuggingFaceModel, grids: Tensor) -> dict[str, Tensor]:
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
        return super().grid_inputs(tower, grids) | {"interp_indices": indices, "interp_weights": weights}

    @property
    def feature_layers(self) -> int:
        return 1 + len(self.checkpoint.config.vision_config.deepstack_visual_indexes)

    def with_features(self, embeddings: Tensor, is_vision: Tensor, features_KZ: Tensor) -> Tensor:
        widened = pad(embeddings, (0, features_KZ.shape[1] - embeddings.shape[-1]))
        return super().with_features(widened, is_vision, features_KZ)

    def decoder_inputs(self, embeddings: Tensor) -> dict[str, Any]:
        """Return the arguments of the decoder's forward pass. Text tokens have zeros as DeepStack features, so that any
        row can be repeated, padded and cut."""
        first, *deeper = embeddings.split(self.checkpoint.config.text_config.hidden_size, dim=-1)
        if not deeper:
            return super().decoder_inputs(first)
        return super().decoder_inputs(first) | {
            # Row indices: with a mask, which has the same effect, every layer would wait for the device.
            "visual_pos_masks": torch.arange(len(first), device=first.device),
            "deepstack_visual_embeds": deeper,
        }


class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL with experts; only its decoder differs."""

    name = "qwen3_vl_moe"
    serves = "Qwen3-VL with experts, such as `Qwen/Qwen3-VL-30B-A3B-Instruct`"
    special = "as `qwen3_vl`; a router chooses the experts of each token"
    vllm = "not tried on a GPU; on a CPU vLLM has no kernels for adapters beside experts"

    def save(self, model: HuggingFaceModel, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        # transformers transposes them when it reads a checkpoint, and does not transpose them back
        turned = (".experts.gate_up_proj", ".experts.down_proj")
        held = model.state_dict() if weights is None else weights
        published = {name: each.transpose(1, 2) if name.endswith(turned) else each for name, each in held.items()}
        model.save_pretrained(directory, state_dict=published, save_original_format=False)


class Qwen35(Qwen3VL):
    """Qwen3.5 without experts, which writes boxes in thousandths of each side."""

    name = "qwen3_5"
    serves = "Qwen3.5, Qwen3.6 and Qwen3.8 without experts, such as `Qwen/Qwen3.5-4B`"
    special = "as `qwen3_vl` without DeepStack; three of four layers are delta nets, whose state branches"
    vllm = "in `make test-vllm`, in process and in bfloat16"
    part_prefixes: ClassVar = Qwen2VL.part_prefixes

    def tower_features(self, output: Any) -> Tensor:
        return Qwen2VL.tower_features(self, output)

    @property
    def feature_layers(self) -> int:
        return 1


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts; only its decoder differs."""

    name = "qwen3_5_moe"
    serves = "Qwen3.5 and Qwen3.6 with experts, such as `Qwen/Qwen3.5-35B-A3B`"
    special = "as `qwen3_5`; a router chooses the experts of each token, and one expert is shared by all"
    vllm = "not tried on a GPU; on a CPU vLLM has no kernels for adapters beside experts"
