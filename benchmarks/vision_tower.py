"""The vision tower of Qwen2.5-VL: attention in one call for all windows of a size, against transformers' `sdpa`.

    python -m benchmarks.vision_tower --side 952 --pictures 1 --layers 8 --rounds 5
    python -m benchmarks.vision_tower --pictures 8 --layers 32 --device cuda --dtype bfloat16

The tower has the published shapes (width 1280, 16 heads, every 8th layer over the whole picture) and random weights;
the real one has 32 layers. Before: patches by transformers' image processor, one call of attention for each window.
Now: `Family.vision_features`. Both take turns within a round, and the first round does not count. The features must be
equal. Writes benchmarks/results/vision_tower.json and .md.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.peers import machine
from benchmarks.peers_report import rounded, spread
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.models.families.base import Checkpoint
from tiercel.models.families.image_transforms import picture_image
from tiercel.models.families.qwen2_vl import Qwen25VL
from tiercel.models.layers.tower_attention import IMPLEMENTATION, tower_inputs
from tiercel.models.weights.loading import DTYPES
from tiercel.types import EncodedImage

WHOLE_EVERY = 8  # layers, the last of which attends over the whole picture
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}  # relative to the largest feature


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A family, a model that has only the tower, and pictures."""

    family: Qwen25VL
    model: Any
    images: Sequence[EncodedImage]

    @property
    def tower(self) -> Any:
        return self.model.model.visual

    def patches_before(self) -> Tensor:
        pictures = [picture_image(image.views[0]) for image in self.images]
        pixels = self.family.checkpoint.image_processor(images=pictures, do_resize=False, return_tensors="pt")
        return pixels["pixel_values"].to(self.tower.device, self.tower.dtype)

    def patches_now(self) -> Tensor:
        device, dtype = self.tower.device, self.tower.dtype
        return torch.cat([self.family.patches(image, device, dtype) for image in self.images])

    def pass_before(self) -> Tensor:
        patches, grids = self.patches_before(), torch.tensor([image.plan.grid for image in self.images])
        return self.tower(patches, grid_thw=grids.to(self.tower.device)).pooler_output

    def pass_now(self) -> Tensor:
        return torch.cat(self.family.vision_features(self.model, self.images))


def build(options: argparse.Namespace) -> Subject:
    """Return the tower on its device, and pictures of random pixels."""
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": options.layers,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "fullatt_block_indexes": list(range(WHOLE_EVERY - 1, options.layers, WHOLE_EVERY)),
        }
    )
    processor = Qwen2VLImageProcessorPil(max_pixels=options.side**2)
    checkpoint = Checkpoint(
        path="", config=config, tokenizer=None, image_processor=processor, chat_template="", end_token_ids=()
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            config.vision_config, dtype=DTYPES[options.dtype], attn_implementation="sdpa"
        )
    family = Qwen25VL(checkpoint, None, None)
    pixels = torch.randint(0, 256, (options.pictures, options.side, options.side, 3), dtype=torch.uint8)
    model = SimpleNamespace(model=SimpleNamespace(visual=tower.requires_grad_(False).eval()))
    return Subject(
        family=family, model=model, images=[family.encode_image(picture_image(each)) for each in pixels.unbind()]
    )


def measure(subject: Subject, rounds: int, tolerance: float) -> dict[str, dict[str, Any]]:
    """Return the seconds before and now, and their ratio, for each part."""
    tower = subject.tower
    grids = torch.tensor([image.plan.grid for image in subject.images])
    inputs = tower_inputs(subject.family.grid_inputs(tower, grids), tower.device)
    hidden = torch.randn(int(grids.prod(-1).sum()), 1280, device=tower.device, dtype=tower.dtype)
    bounds = inputs["cu_window_seqlens"]
    layer = partial(
        tower.blocks[0].attn, hidden, position_embeddings=tower.rotary_pos_emb(hidden, inputs["position_ids"])
    )
    parts: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "patches of the pictures": (subject.patches_before, subject.patches_now),
        "attention of a layer with windows, and its projections": (
            partial(layer, cu_seqlens=bounds.to(tower.device)),
            partial(layer, cu_seqlens=bounds),
        ),
        "the whole pass": (subject.pass_before, subject.pass_now),
    }
    return {name: _compared(tower, ways, rounds, tolerance) for name, ways in parts.items()}


def _compared(
    tower: Any, ways: tuple[Callable[[], Tensor], Callable[[], Tensor]], rounds: int, tolerance: float
) -> dict[str, Any]:
    taken: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        (before, expected), (now, found) = (
            _timed(tower, implementation, way)
            for implementation, way in zip(("sdpa", IMPLEMENTATION), ways, strict=True)
        )
        taken.append((before, now))
        if (gap := float((found - expected).abs().max() / expected.abs().max())) > tolerance:
            raise SystemExit(f"the results differ by {gap:.2g} of the largest")
    counted = taken[1:]
    return {
        "before_seconds": spread([before for before, _ in counted]),
        "now_seconds": spread([now for _, now in counted]),
        "ratio": spread([before / now for before, now in counted]),
        "largest_gap": rounded(gap),
    }


def _timed(tower: Any, implementation: str, way: Callable[[], Tensor]) -> tuple[float, Tensor]:
    tower.config._attn_implementation = implementation
    start = time.perf_counter()
    with torch.no_grad():
        result = way()
    if result.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def markdown(results: Mapping[str, Any]) -> str:
    """Return a row for each part."""
    rows = [
        (
            name,
            _milliseconds(part["before_seconds"]),
            _milliseconds(part["now_seconds"]),
            f"{part['ratio']['median']:.2f} ({part['ratio']['min']:.2f} to {part['ratio']['max']:.2f})",
            f"{part['largest_gap']:.1g}",
        )
        for name, part in results["parts"].items()
    ]
    table = markdown_table(("part", "before, ms", "now, ms", "times as fast", "largest gap of the results"), rows)
    return (
        f"{results['pictures']} x {results['side']} x {results['side']} pixels, {results['layers']} of the "
        f"tower's 32 layers, {results['dtype']}, {results['device']}; median (min to max) of {results['rounds']} "
        f"rounds; load {results['load']:.1f} before. The gap is a fraction of the largest number.\n\n{table}"
    )


def _milliseconds(value: Mapping[str, float]) -> str:
    return f"{1e3 * value['median']:.3g} ({1e3 * value['min']:.3g} to {1e3 * value['max']:.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=952, help="pixels, a multiple of 28")
    parser.add_argument("--pictures", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--output", type=Path, default=RESULTS / "vision_tower.json")
    options = parser.parse_args()
    load = rounded(os.getloadavg()[0])
    subject = build(options)
    results = {
        "machine": machine(),
        "versions": versions(),
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads",
        "load": load,
        **{key: getattr(options, key) for key in ("side", "pictures", "layers", "rounds", "dtype")},
        "parts": measure(subject, options.rounds, TOLERANCE[options.dtype]),
    }
    write_results(options.output, results, markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
