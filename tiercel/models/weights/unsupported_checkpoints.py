"""Checkpoints in their authors' own format, which need code of their own, and what to use instead of each.

A checkpoint is recognised by `model_type` or `architectures` in its config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import __version__

from tiercel.errors import ModelError


@dataclass(frozen=True, slots=True)
class UnsupportedCheckpoint:
    """A model whose authors publish it with code of its own."""

    name: str
    instead: str = ""  # checkpoints in transformers' own format; empty: transformers has no class for the model
    folder: str = ""  # of transformers' script that converts the authors' weights; empty: there is none

    @property
    def script(self) -> str:
        """Return the place of the script that converts the authors' weights, in the repository of transformers."""
        return f"src/transformers/models/{self.folder}/convert_{self.folder}_weights_to_hf.py"


UNSUPPORTED: Mapping[str, UnsupportedCheckpoint] = {
    "ovis": UnsupportedCheckpoint("Ovis2", "thisisiron/Ovis2-2B-hf", "ovis2"),
    "internvl_chat": UnsupportedCheckpoint(
        "InternVL", "OpenGVLab/InternVL3_5-8B-HF, OpenGVLab/InternVL3-8B-hf", "internvl"
    ),
    "minicpmv": UnsupportedCheckpoint("MiniCPM-V", "openbmb/MiniCPM-V-4.6"),
    "minicpmo": UnsupportedCheckpoint("MiniCPM-o", "openbmb/MiniCPM-V-4.6"),
    "kimi_vl": UnsupportedCheckpoint("Kimi-VL"),
    "LlavaLlamaForCausalLM": UnsupportedCheckpoint("LLaVA", "llava-hf/llava-1.5-7b-hf", "llava"),
    "LlavaQwenForCausalLM": UnsupportedCheckpoint(
        "LLaVA-OneVision", "llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava_onevision"
    ),
}


def require_transformers_form(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a checkpoint in its authors' own format, naming the form that works."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    names = [name for name in (config.get("model_type"), *listed) if isinstance(name, str)]
    form = next((UNSUPPORTED[name] for name in names if name in UNSUPPORTED), None)
    if form is None:
        return
    if not form.instead:
        raise ModelError(
            f"{path} is {form.name}, whose code tiercel never runs, and the installed transformers {__version__} has "
            "no class for it; use another model"
        )
    if form.folder:
        raise ModelError(
            f"{path} is {form.name} in its authors' own format, whose code tiercel never runs; use a checkpoint in "
            f"transformers' own format, such as {form.instead}, or convert it with transformers' {form.script}"
        )
    raise ModelError(
        f"{path} is {form.name} in its authors' own format, whose code tiercel never runs; use a checkpoint in "
        f"transformers' own format, such as {form.instead}"
    )
