"""Advantages, divergences and losses as pure functions on tensors, without models, ranks or logging.

What a recipe can name is a table next to the functions, and the keys that an entry reads are declared there. Adding an
entry changes its file, its test, and docs/algorithms.md, which `make docs` writes.
"""

from tiercel.algorithms.advantages import ADVANTAGES, advantage_of, advantages
from tiercel.algorithms.correction import importance_weights
from tiercel.algorithms.kl import KL_ESTIMATORS
from tiercel.algorithms.losses import LOSSES
from tiercel.algorithms.policy_loss import policy_loss
from tiercel.algorithms.types import LossInput, LossOutput, Options, RewardTable, TokenTerms, Totals

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "LOSSES",
    "LossInput",
    "LossOutput",
    "Options",
    "RewardTable",
    "TokenTerms",
    "Totals",
    "advantage_of",
    "advantages",
    "importance_weights",
    "policy_loss",
]
