"""What an update depends on besides its rows: the learning rate and the seed of its dropout."""

import math

import torch

from tiercel.config.schema import Optim


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout as a function of (seed, step, rank), so that a resumed run repeats it."""
    torch.manual_seed((seed * 1_000_003 + step + rank * 7_919_000_003) % 2**63)


def decay_steps(optim: Optim, total_steps: int) -> int:
    """Return over how many of its last updates the rate of `wsd` falls."""
    return optim.decay_steps or max(1, total_steps // 10)


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Compute the rate of the update that follows `step` finished steps. `wsd`: Hu et al. 2024 (MiniCPM)."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    progress = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    match optim.schedule:
        case "constant":
            return optim.lr
        case "wsd":
            share = min(1.0, (total_steps - step) / decay_steps(optim, total_steps))
        case "linear":
            share = 1 - progress
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr + (optim.lr - optim.min_lr) * share
