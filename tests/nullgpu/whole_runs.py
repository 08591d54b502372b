"""Whole runs from tiny checkpoints on a null card: `python -m tests.nullgpu.whole_runs CASE..` prints a line each."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.ovis2.modeling_ovis2 import Ovis2Model

from tests.nullgpu.checks import DONE, LOOK, PREFILL, TOKEN, TRANSFORMERS, summary
from tests.nullgpu.computed import stand_in
from tests.nullgpu.log import logged, mark
from tests.nullgpu.planted import PLANTED
from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint
from tests.training.test_loops import grpo_recipe, merged, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.rollout.local.cuda_graphs import FixedDecoder
from tiercel.rollout.local.engine import LocalSampler

FAMILY = "qwen2_5_vl"
COMMON: dict[str, Any] = {
    "data": {"workers": 0, "eval": None},
    "train": {"steps": 2, "save_every": 2},
    "model": {"dtype": "bfloat16"},
    "learner": {"max_tokens_per_microbatch": 250, "compile": False},
}
GRPO = merged(
    COMMON,
    {
        "learner": {"skip_zero_advantage": False},
        "rollout": {"group_size": 3, "max_new_tokens": 6, "parity_action": "warn"},
    },
)
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compiled": {"learner": {"compile": True}},
    "deterministic": {"train": {"deterministic": True}},
    "nf4": {"model": {"quantize": "nf4"}},
}
OF_ONE: dict[str, dict[str, Any]] = {
    "compiled by default": {"learner": {"compile": "auto"}},
    "int8": {"model": {"quantize": "int8"}},
    "full": {"lora": None},
    "full, compiled": {"lora": None, "learner": {"compile": True}},
    "checkpointing": {"learner": {"gradient_checkpointing": "full"}},
    "checkpointing, compiled": {"learner": {"gradient_checkpointing": "full", "compile": True}},
    "selective checkpointing": {"learner": {"gradient_checkpointing": "selective"}},
    "KL in the loss, entropy": {"algorithm": {"kl": {"coef": 0.1}, "entropy_coef": 0.01}},
    "KL in the reward": {"algorithm": {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}}},
    "sampling, stop": {
        "rollout": {"max_new_tokens": 20, "top_p": 0.9, "top_k": 5, "temperature": 0.7, "stop": ["seven"]}
    },
    "rows that leave": {"rollout": {"group_size": 8, "max_new_tokens": 40, "min_new_tokens": 17}},
    "workers": {"data": {"workers": 2}},
    "float16": {"model": {"dtype": "float16"}},
    "float32": {"model": {"dtype": "float32"}},
    "8-bit moments": {"optim": {"name": "adamw_8bit"}},
    "paged moments": {"optim": {"name": "paged_adamw"}},
    "DoRA": {"lora": {"kind": "dora"}},
    "adapters in the tower": {"lora": {"targets": "all"}},
    "repeated": {"learner": {"form": "repeated", "max_tokens_per_microbatch": 900}},
    "dense": {"learner": {"form": "dense"}},
    "evaluation": {"data": {"eval": {"count": 3}}, "train": {"eval_every": 1}},
    "off policy": {
        "optim": {"minibatches": 2, "prompts_per_step": 4},
        "algorithm": {"correction": {"level": "token"}, "top_entropy": 0.5},
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}: {name}": (family, changes) for name, changes in OF_FAMILIES.items() for family in FAMILY_NAMES
}
CASES |= {name: (FAMILY, changes) for name, changes in OF_ONE.items()}
CASES |= {"SFT": (FAMILY, {}), "SFT, compiled": (FAMILY, {"learner": {"compile": True}})}
CASES |= {name: (FAMILY, {}) for name in PLANTED}


def run_case(name: str, directory: Path) -> dict[str, Any]:
    """Run a case, and return what its log says."""
    family, changes = CASES[name]
    checkpoint, rows = save_tiny_checkpoint(family, directory / "model"), write_rows(directory)
    with logged() as log:
        if name.startswith("SFT"):
            run_offline(sft_recipe(checkpoint, rows, directory / "run", **merged(COMMON, changes)))
        else:
            run_grpo(grpo_recipe(checkpoint, rows, directory / "run", **merged(GRPO, changes)))
        stream = torch.cuda.current_stream()
    return {
        "case": name,
        **summary(log),
        "default_stream": stream == torch.cuda.default_stream(),
        "kernels": sorted({name for name in log.counted("launch") if "flex_attention" in name or "flash_fwd" in name}),
    }


def mark_calls() -> None:
    """Mark in the log where prompts are run, where each token begins, where the sampler looks which rows have ended,
    and the features of pictures that transformers makes by itself."""
    for label, kind, name in (
        (PREFILL, FixedDecoder, "prefill"),
        (TOKEN, FixedDecoder, "step"),
        (LOOK, LocalSampler, "_kept"),
        (LOOK, LocalSampler, "_completes_a_stop"),
        (TRANSFORMERS, Ovis2Model, "get_image_features"),
        (TRANSFORMERS, LlavaOnevisionModel, "get_image_features"),
    ):
        setattr(kind, name, _marked(label, getattr(kind, name)))


def _marked(label: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*given: Any, **options: Any) -> Any:
        mark(label)
        made = method(*given, **options)
        if label == TRANSFORMERS:
            mark(DONE)
        return made

    return marked


if __name__ == "__main__":
    stand_in()
    for case in sys.argv[1:]:
        PLANTED.get(case, lambda: None)()
        mark_calls()
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(run_case(case, Path(scratch))), flush=True)
