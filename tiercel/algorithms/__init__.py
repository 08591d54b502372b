"""Pure functions on tensors: advantages, divergences, losses. No model, no ranks, no logging."""

from tiercel.algorithms.advantages import ADVANTAGES, Options, RewardTable, advantages
from tiercel.algorithms.correction import importance_weights
from tiercel.algorithms.kl import KL_ESTIMATORS, KlTerm
from tiercel.algorithms.losses import LOSSES, LossInput, LossOutput, Totals, policy_loss

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "LOSSES",
    "KlTerm",
    "LossInput",
    "LossOutput",
    "Options",
    "RewardTable",
    "Totals",
    "advantages",
    "importance_weights",
    "policy_loss",
]
