"""Pure functions on tensors: advantages, divergences, losses. No model, no ranks, no logging."""

from tiercel.algorithms.advantages import ADVANTAGES
from tiercel.algorithms.correction import importance_weights
from tiercel.algorithms.kl import KL_ESTIMATORS
from tiercel.algorithms.losses import LOSSES, LossInput, LossOutput, Totals

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "LOSSES", "LossInput", "LossOutput", "Totals", "importance_weights"]
