"""The plan's bytes against the peak of live bytes of the real code, with all its layers, on fake tensors."""

import gc
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.published import save_config
from tiercel.config.schema import GrpoRecipe
from tiercel.models.layers.attention import route_attention
from tiercel.packing.logprobs import GPU_TILE
from tiercel.planning.memory import Layout, rank_memory
from tiercel.planning.options import Subject, measure, study
from tiercel.planning.probe import LiveBytes, ProbedLearner, fake_tensors, fill_with_fakes, packed_case

LORA = {"rank": 64, "alpha": 128}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2.5-vl 3b": ("qwen2_5_vl", "3b", {}),
    "qwen2.5-vl 3b, checkpointed": ("qwen2_5_vl", "3b", {"learner": {"gradient_checkpointing": True}}),
    "qwen2.5-vl 3b, float32": ("qwen2_5_vl", "3b", {"model": {"dtype": "float32"}}),
    "qwen2.5-vl 3b, language trained": (
        "qwen2_5_vl",
        "3b",
        {"lora": None, "learner": {"gradient_checkpointing": True}},
    ),
    "qwen2.5-vl 3b, prompts repeated": ("qwen2_5_vl", "3b", {"learner": {"form": "repeated"}}),
    "qwen2.5-vl 7b": ("qwen2_5_vl", "7b", {}),
    "qwen2.5-vl 7b, checkpointed, 32k tokens": (
        "qwen2_5_vl",
        "7b",
        {"learner": {"gradient_checkpointing": True, "max_tokens_per_microbatch": 32768}},
    ),
    "qwen2.5-vl 7b, checkpointed in part": (
        "qwen2_5_vl",
        "7b",
        {"learner": {"gradient_checkpointing": "selective"}},
    ),
    "qwen2.5-vl 32b, checkpointed": ("qwen2_5_vl", "32b", {"learner": {"gradient_checkpointing": True}}),
    "qwen2.5-vl 72b, checkpointed": (
        "qwen2_5_vl",
        "72b",
        {"lora": {"rank": 16, "alpha": 32}, "learner": {"gradient_checkpointing": True}},
    ),
    "qwen2-vl 2b": ("qwen2_vl", "1.5b", {"lora": {"rank": 8, "alpha": 16}}),
    "qwen2-vl 7b, long completions": ("qwen2_vl", "7b", {"rollout": {"max_new_tokens": 1024}}),
    "ovis2 1b": ("ovis2", "0.5b", {}),
    "ovis2 1b, fully trained": ("ovis2", "0.5b", {"lora": None}),
}


def recipe_of(directory: Path, changes: dict[str, Any]) -> GrpoRecipe:
    tree: dict[str, Any] = {
        "model": {"path": str(directory)},
        "lora": LORA,
        "data": {"train": "rows.jsonl", "max_prompt_tokens": 1200},
        "rewards": [{"name": "exact"}],
        "rollout": {"max_new_tokens": 128, "group_size": 8},
        "learner": {"max_tokens_per_microbatch": 8192},
        "train": {"steps": 1},
        "output": "run",
    }
    for section, values in changes.items():
        tree[section] = {**tree[section], **values} if isinstance(values, dict) and tree[section] else values
    return GrpoRecipe.model_validate(tree)


def module_bytes(module: torch.nn.Module) -> int:
    """Of parameters and buffers, a shared one once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def real_peak(subject: Subject) -> int:
    """Bytes of the second update's passes: weights, gradients, moments and all that a pass holds."""
    recipe = subject.recipe
    policy = subject.empty_policy(subject.sizes.layers)
    packed = packed_case(
        subject.composition, recipe.learner.max_tokens_per_microbatch, subject.family.position_dimensions
    )
    with fake_tensors():
        fill_with_fakes(policy.model)
        route_attention(subject.family.language_model(policy.model))
        form = "split" if recipe.learner.form == "auto" else recipe.learner.form
        learner = ProbedLearner(policy, form, recipe.learner.gradient_checkpointing)
        learner.head.tile = GPU_TILE
        with LiveBytes() as live:
            for _ in range(2):  # the second microbatch finds gradients there
                learner.train()
                learner(packed, None, 1.0).logprobs_N.sum().backward()
                gc.collect()
    return module_bytes(policy.model) + live.peak


def test_live_bytes_are_those_of_torchs_own_tracker():
    """On a model without frozen weights, for which that tracker was made. It takes minutes for a whole checkpoint."""
    with fake_tensors():
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        inputs = torch.randn(32, 64)
        tracker = MemTracker()
        tracker.track_external(model, inputs)
        with tracker:
            model(inputs).square().sum().backward()
        theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        model.zero_grad(set_to_none=True)
        with LiveBytes() as live:
            model(inputs).square().sum().backward()
    assert live.peak + module_bytes(model) + inputs.nbytes == pytest.approx(theirs, rel=0.01)


def compared(name: str, directory: Path) -> tuple[int, int]:
    """A case's bytes, planned and real."""
    family, size, changes = CASES[name]
    subject = study(recipe_of(save_config(family, size, directory), changes), None)
    recipe, sizes = subject.recipe, subject.sizes
    tokens = recipe.learner.max_tokens_per_microbatch
    layout = Layout(strategy="single", ranks=1, tokens=tokens, on_gpu=False)
    planned = rank_memory(recipe, sizes, measure(subject), None, layout)
    return planned.phases["learn"] - planned.components["optimizer moments"], real_peak(subject)


@pytest.mark.scale
def test_the_memory_model_is_within_a_tenth_of_the_real_code(tmp_path):
    """Two cases at a time, since each keeps one core busy for many seconds, whatever torch has of threads."""
    errors = {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        directories = [tmp_path / str(number) for number in range(len(CASES))]
        for name, (expected, found) in zip(CASES, pool.map(compared, CASES, directories), strict=True):
            errors[name] = expected / found - 1
            print(
                f"{name}: planned {expected / 1e9:.2f} GB, real {found / 1e9:.2f} GB, {errors[name]:+.1%}", flush=True
            )
    assert len(errors) >= 12
    assert statistics.median(abs(error) for error in errors.values()) <= 0.10
    assert min(errors.values()) >= -0.15
