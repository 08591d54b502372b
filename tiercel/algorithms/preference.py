"""Losses of preference pairs, by name, and the loss of labelled answers, as pure functions of logprobs.

B is the number of pairs. Of a pair's two answers, w is the chosen and l the rejected one; log p is an answer's logprob
summed over the tokens, and log p/n its mean; r is the reference, beta `dpo.beta`, s the logistic function, and v the
value of a reward model.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from tiercel.algorithms.f_divergences import F_DIVERGENCES
from tiercel.algorithms.preference_sections import Dpo, Kto, PairLossName
from tiercel.algorithms.types import Described, described


@dataclass(frozen=True, kw_only=True, slots=True)
class PairInput:
    """The input of a loss of pairs, all fp32 (B, 2): the chosen answer's value, then the rejected answer's."""

    logprobs_B2: Tensor  # sums over the answer's tokens, with gradient
    reference_B2: Tensor | None  # the same from the reference; None: the loss has no reference
    lengths_B2: Tensor  # scored tokens
    matched_B2: Tensor | None = None  # for losses in MATCHED: the value at the same place in the step's order
    shift: float  # for `bco_pair` and `mpo`: the mean implicit reward of the pairs so far

    def rewards_B2(self, dpo: Dpo) -> Tensor:
        """Compute the implicit rewards: beta (log p - log r), or beta times what the loss compares without r. For a
        divergence other than the reverse KL, they are beta times its own reward of log p - log r."""
        values_B2 = self.logprobs_B2
        if self.reference_B2 is not None:
            values_B2 = F_DIVERGENCES[dpo.divergence].reward(values_B2 - self.reference_B2, dpo.power)
        return dpo.beta * (values_B2 / self.lengths_B2 if dpo.compares_means else values_B2)

    @property
    def means_B2(self) -> Tensor:
        """Return the logprobs averaged over the tokens."""
        return self.logprobs_B2 / self.lengths_B2


def _margins(pairs: PairInput, dpo: Dpo) -> Tensor:
    rewards_B2 = pairs.rewards_B2(dpo)
    return rewards_B2[:, 0] - rewards_B2[:, 1]


def _smoothed(margins_B: Tensor, smoothing: float) -> Tensor:
    """Compute -(1 - e) log s(m) - e log s(-m)."""
    return -(1 - smoothing) * logsigmoid(margins_B) - smoothing * logsigmoid(-margins_B)


def sigmoid(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute DPO's loss (B,)."""
    return _smoothed(_margins(pairs, dpo), dpo.label_smoothing)


def ipo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute IPO's loss (B,), with logprobs averaged over tokens."""
    return (_margins(pairs, dpo) / dpo.beta - 1 / (2 * dpo.beta)) ** 2


def hinge(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute SLiC's hinge on the margin of implicit rewards (B,)."""
    return (1 - _margins(pairs, dpo)).relu()


def robust(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute robust DPO's loss (B,)."""
    margins_B, noise = _margins(pairs, dpo), dpo.label_smoothing
    return (-(1 - noise) * logsigmoid(margins_B) + noise * logsigmoid(-margins_B)) / (1 - 2 * noise)


def bco(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute BCO's loss of a pair (B,), which compares each answer on its own with the shift."""
    rewards_B2 = pairs.rewards_B2(dpo) - pairs.shift
    return -logsigmoid(rewards_B2[:, 0]) - logsigmoid(-rewards_B2[:, 1])


def exo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute EXO's loss of a pair (B,): KL(q || p) of q = (s(m), s(-m)) and p = (1 - e, e)."""
    margins_B, noise = _margins(pairs, dpo), dpo.label_smoothing
    wanted_B = margins_B.sigmoid() * (logsigmoid(margins_B) - math.log1p(-noise))
    return wanted_B + (-margins_B).sigmoid() * (logsigmoid(-margins_B) - math.log(noise))


def nca(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute NCA's loss of a pair (B,), which keeps the chosen answer's reward from falling."""
    chosen_B, rejected_B = pairs.rewards_B2(dpo).unbind(1)
    return -logsigmoid(chosen_B) - 0.5 * logsigmoid(-chosen_B) - 0.5 * logsigmoid(-rejected_B)


def sppo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute SPPO's squares (B,) if the chosen answer always wins: the log ratios aim at 1 / (2 beta) and its
    negative."""
    ratios_B2, wanted = pairs.rewards_B2(dpo) / dpo.beta, 1 / (2 * dpo.beta)
    return (ratios_B2[:, 0] - wanted) ** 2 + (ratios_B2[:, 1] + wanted) ** 2


def apo_zero(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute APO-zero's loss (B,): the chosen answer up, the rejected one down."""
    chosen_B, rejected_B = pairs.rewards_B2(dpo).unbind(1)
    return (-chosen_B).sigmoid() + rejected_B.sigmoid()


def apo_down(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute APO-down's loss (B,): both answers down, the rejected one further."""
    chosen_B, rejected_B = pairs.rewards_B2(dpo).unbind(1)
    return chosen_B.sigmoid() + (rejected_B - chosen_B).sigmoid()


def discopop(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute DiscoPOP's loss (B,): logistic for margins below 0, exponential above, blended by s(m / tau)."""
    margins_B = _margins(pairs, dpo)
    towards_B = margins_B / dpo.passage
    # On its own, exp(-m) would overflow far below 0, where its share is 0.
    exponential_B = (logsigmoid(towards_B) - margins_B).exp()
    return -(-towards_B).sigmoid() * logsigmoid(margins_B) + exponential_B


def aot(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute AOT's loss (B,): the policy's k-th smallest margin of the step against the reference's k-th smallest."""
    assert pairs.matched_B2 is not None
    margins_B = pairs.logprobs_B2[:, 0] - pairs.logprobs_B2[:, 1] - pairs.matched_B2[:, 0]
    return _smoothed(dpo.beta * margins_B, dpo.label_smoothing)


def aot_unpaired(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute unpaired AOT's loss (B,): the k-th smallest log ratio of the step's chosen answers against the k-th
    smallest of its rejected ones."""
    assert pairs.matched_B2 is not None and pairs.reference_B2 is not None
    ratios_B2 = pairs.logprobs_B2 - pairs.reference_B2
    chosen_B = _smoothed(dpo.beta * (ratios_B2[:, 0] - pairs.matched_B2[:, 0]), dpo.label_smoothing)
    rejected_B = _smoothed(dpo.beta * (pairs.matched_B2[:, 1] - ratios_B2[:, 1]), dpo.label_smoothing)
    both_B = chosen_B + rejected_B
    # Each comparison occurs twice, once with a gradient for each answer, so its value is halved each time.
    return both_B - both_B.detach() / 2


def matched(values: Mapping[int, tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Match each pair's two values with values of equal rank on the other side: its first value with the second value
    that has the same rank among all second values, and vice versa. `values` is keyed by the pair's index and holds
    margins of policy and reference for `aot`, and log ratios of chosen and rejected answers for `aot_unpaired`."""
    sides = list(zip(*values.values(), strict=True)) or [(), ()]
    found: dict[int, list[float]] = {index: [] for index in values}
    for side in (0, 1):
        by_place = sorted(values, key=lambda index: (values[index][side], index))
        for index, other in zip(by_place, sorted(sides[1 - side]), strict=True):
            found[index].append(other)
    return {index: (first, second) for index, (first, second) in found.items()}


def mpo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute MPO's preference and quality losses (B,); its third term, SFT, is `dpo.sft_coef`."""
    return 0.8 * sigmoid(pairs, dpo) + 0.2 * bco(pairs, dpo)


def orpo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute ORPO's odds-ratio term (B,), times beta; its other term, SFT, is `dpo.sft_coef`."""
    means_B2 = pairs.means_B2
    log_odds_B2 = means_B2 - log1mexp(means_B2)
    return -dpo.beta * logsigmoid(log_odds_B2[:, 0] - log_odds_B2[:, 1])


def simpo(pairs: PairInput, dpo: Dpo) -> Tensor:
    """Compute SimPO's loss (B,)."""
    return _smoothed(_margins(pairs, dpo) - dpo.wanted_margin, dpo.label_smoothing)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLoss(Described):
    """A loss of pairs."""

    compute: Callable[[PairInput, Dpo], Tensor]


PAIR_LOSSES: dict[PairLossName, PairLoss] = described(
    "pair loss",
    {
        "sigmoid": PairLoss(compute=sigmoid),
        "ipo": PairLoss(compute=ipo),
        "hinge": PairLoss(compute=hinge),
        "robust": PairLoss(compute=robust),
        "exo_pair": PairLoss(compute=exo),
        "nca_pair": PairLoss(compute=nca),
        "bco_pair": PairLoss(compute=bco),
        "sppo_hard": PairLoss(compute=sppo),
        "apo_zero": PairLoss(compute=apo_zero),
        "apo_down": PairLoss(compute=apo_down),
        "discopop": PairLoss(compute=discopop),
        "aot": PairLoss(compute=aot),
        "aot_unpaired": PairLoss(compute=aot_unpaired),
        "mpo": PairLoss(compute=mpo),
        "orpo": PairLoss(compute=orpo),
        "simpo": PairLoss(compute=simpo),
        "cpo": PairLoss(compute=sigmoid),
        "cpo_ipo": PairLoss(compute=ipo),
        "cpo_hinge": PairLoss(compute=hinge),
    },
)


def kto_losses(rewards_B: Tensor, desirable_B: Tensor, divergence: Tensor | float, kto: Kto) -> Tensor:
    """Compute KTO's loss of labelled answers (B,): weight * (1 - s(+-(reward - z))), with the sign and weight of the
    label and z = beta * `divergence`, where `divergence` estimates the policy's KL from the reference and is at least 0
    (Ethayarajh et al. 2024). `rewards_B`: beta (log p - log r)."""
    margins_B = rewards_B - kto.beta * divergence
    wanted_B = (1 - margins_B.sigmoid()) * kto.desirable_weight
    unwanted_B = (1 - (-margins_B).sigmoid()) * kto.undesirable_weight
    return wanted_B.where(desirable_B, unwanted_B)


def wpo_weights(aligned_B2: Tensor) -> Tensor:
    """Compute WPO's weights of pairs (B,): exp of the sum of both answers' values (Zhou et al. 2024, equation 2).
    `aligned_B2`: the means over an answer's tokens of log p less the log of the sum of p² over all words, detached."""
    return aligned_B2.sum(1).exp()


def log1mexp(values: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012)."""
    values = values.clamp(max=-1e-7)  # a logprob of 0 would mean infinite odds
    near, far = (-values.expm1()).log(), (-values.exp()).log1p()
    return near.where(values > -math.log(2), far)


def ranking_losses(values_B2: Tensor, margins_B: Tensor, centre_coef: float) -> Tensor:
    """Compute the Bradley-Terry loss of a reward model (B,): -log s(v_w - v_l - margin) + centre_coef (v_w + v_l)². The
    second term is from Eisenstein et al. 2023."""
    losses_B = -logsigmoid(values_B2[:, 0] - values_B2[:, 1] - margins_B)
    return losses_B + centre_coef * values_B2.sum(1) ** 2
