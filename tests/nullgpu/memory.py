"""The learner of a full-size model in PyTorch's own allocator: `python -m tests.nullgpu.memory MODEL SETTINGS GROUPS`
prints the bytes by phase. MODEL is one of benchmarks.gpu.models, SETTINGS are keys of `learner`."""

import gc
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.learners import SharedLearner
from benchmarks.gpu.models import MODELS, random_policy
from benchmarks.gpu.steps import make_groups
from tests.nullgpu.shapes import GROUP, GROUP_TOKENS
from tiercel.config.schema import Optim
from tiercel.distributed.strategies.optimizer import build_optimizer


def peak(run: Callable[[], Any]) -> dict[str, int]:
    """Run a phase, and return the most bytes that its tensors took and that the allocator held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def learner_bytes(model: str, settings: Mapping[str, Any], groups: int) -> dict[str, Any]:
    """Learn from two microbatches of `groups` groups, twice. The first time compiles, and makes the moments."""
    policy = random_policy(MODELS[model], torch.device("cuda"), torch.bfloat16)
    optimizer = build_optimizer(policy, Optim())
    made = make_groups(policy, replace(GROUP, groups=2 * groups))
    learner = SharedLearner(policy, made, {"max_tokens_per_microbatch": groups * GROUP_TOKENS, **settings})
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        learn, update = peak(learner.update), peak(optimizer.step)
    return {"model": model, "settings": settings, "groups": groups, "learn": learn, "update": update}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False  # there is no null cuDNN
    print(json.dumps(learner_bytes(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))), flush=True)
