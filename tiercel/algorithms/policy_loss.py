"""The loss of a microbatch: the policy's term, which the recipe names, plus the KL and entropy terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tiercel.algorithms.custom import own_terms
from tiercel.algorithms.losses import NORMALISERS, OwnLoss
from tiercel.algorithms.ratios import RATIOS
from tiercel.algorithms.section import Algorithm
from tiercel.algorithms.surrogates import SURROGATES
from tiercel.algorithms.types import LossInput, LossOutput, TokenTerms

if TYPE_CHECKING:
    from torch import Tensor


def policy_loss(batch: LossInput, algorithm: Algorithm) -> LossOutput:
    """Compute w L + kl.coef KL - entropy_coef entropy + teacher.coef D at each token, times the normaliser, summed.

    `token_sums` holds those of the policy's term L, such as clip/low_fraction, and kl/mean if there is a KL term.
    Raises TrainingError if a user's own loss fails.
    """
    terms = _policy_terms(batch, algorithm)
    values_N = terms.values_N if batch.weights_N is None else batch.weights_N * terms.values_N
    token_sums = dict(terms.token_sums)
    if batch.kl_N is not None:
        values_N = values_N + algorithm.kl.coef * batch.kl_N
        token_sums["kl/mean"] = batch.kl_N.detach().sum()
    if batch.entropy_N is not None and algorithm.entropy_mean == "loss":
        values_N = values_N - algorithm.entropy_coef * batch.entropy_N
    if batch.teacher_N is not None:
        values_N = values_N + batch.teacher_N
    loss = (values_N * NORMALISERS[algorithm.normaliser_name].of(batch)).sum()
    if batch.entropy_N is not None and algorithm.entropy_mean == "token":
        loss = loss - algorithm.entropy_coef * (batch.entropy_N * NORMALISERS["token"].of(batch)).sum()
    return LossOutput(loss=loss, token_sums=token_sums)


def _policy_terms(batch: LossInput, algorithm: Algorithm) -> TokenTerms:
    if isinstance(algorithm.loss, OwnLoss):
        return own_terms(algorithm.loss.call, batch)
    loss = algorithm.parts
    assert loss is not None
    log_ratios_N = batch.logprobs_N - batch.old_logprobs_N
    ratio_N = RATIOS[loss.ratio].of(log_ratios_N, batch.completion_of_N, len(batch.advantages_C))
    return SURROGATES[loss.surrogate].of(ratio_N, batch.advantages_N, batch.logprobs_N, algorithm)


def entropy_threshold(entropies: Tensor, share: float) -> float:
    """Return the entropy that `share` of the tokens reach: the k-th largest of n, k = ceil(share x n), or 0 without
    tokens.

    Wang et al. 2025, "Beyond the 80/20 rule: high-entropy minority tokens drive effective reinforcement learning".
    """
    if not len(entropies):
        return 0.0
    kept = math.ceil(share * len(entropies))
    return float(entropies.kthvalue(len(entropies) - kept + 1).values)
