"""The learning rate of an update."""

import math

from tiercel.config.schema import Optim


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The rate of the update that follows `step` finished steps."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup_steps) / max(1, total_steps - optim.warmup_steps)
    return optim.lr * (1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
