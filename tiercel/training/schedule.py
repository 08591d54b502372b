"""What an update depends on besides its rows: the learning rate and the seed of its dropout."""

import math

import torch

from tiercel.config.schema import BaseRecipe, Optim
from tiercel.training.trainer import Trainer


def prepare_update(trainer: Trainer, recipe: BaseRecipe, step: int, total_steps: int) -> float:
    """Set and return the learning rate of the update that follows `step` finished steps, and seed its dropout."""
    rate = learning_rate(recipe.optim, step, total_steps)
    trainer.strategy.set_learning_rate(rate)
    seed_step(recipe.train.seed, step, trainer.ranks.rank)
    return rate


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed dropout as a function of (seed, step, rank), so that a resumed run repeats it."""
    torch.manual_seed((seed * 1_000_003 + step + rank * 7_919_000_003) % 2**63)


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Compute the rate of the update that follows `step` finished steps."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    return optim.lr * (1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
