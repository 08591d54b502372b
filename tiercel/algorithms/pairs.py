"""Losses of preference pairs, by name, and the loss of labelled answers. Pure functions of logprobs.

B pairs; of a pair's two answers w is the chosen one and l the rejected one, log p their logprob summed over the tokens,
log p/n its mean; r is the reference, beta `dpo.beta`, s the logistic function, v the value of a reward model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from tiercel.algorithms.pair_section import Dpo, Kto, PairLossName
from tiercel.algorithms.types import Described


@dataclass(frozen=True, kw_only=True, slots=True)
class PairInput:
    """Holds what a loss of pairs takes, all fp32 (B, 2): the chosen answer's, and the rejected answer's."""

    logprobs_B2: Tensor  # sums over the answer's tokens, with gradient
    reference_B2: Tensor | None  # the same of the reference; None: the loss compares with none
    lengths_B2: Tensor  # scored tokens
    shift: float  # for `mpo`: the mean implicit reward of the pairs so far

    def rewards_B2(self, dpo: Dpo) -> Tensor:
        """Compute the implicit rewards: beta (log p - log r), or beta times what the loss compares without r."""
        values_B2 = self.logprobs_B2 if self.reference_B2 is None else self.logprobs_B2 - self.reference_B2
        return dpo.beta * (values_B2 / self.lengths_B2 if dpo.compares_means else values_B2)

    @property
    def means_B2(self) -> Tensor:
        """Average the logprobs over the tokens."""
        return self.logprobs_B2 / self.lengths_B2


def _margins(pairs: PairInput, dpo: Dpo) -> Tensor:
    rewards_B2 = pairs.rewards_B2(dpo)
    return rewards_B2[:, 0] - rewards_B2[:, 1]


def _smoothed(margins_B: Tensor, smoothing: float) -> Tensor:
    """-(1 - e) log s(m) - e log s(-m)."""
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
    """Compute BCO's loss of a pair (B,): each answer by itself against the shift."""
    rewards_B2 = pairs.rewards_B2(dpo) - pairs.shift
    return -logsigmoid(rewards_B2[:, 0]) - logsigmoid(-rewards_B2[:, 1])


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


_MARGIN = "m = beta (log pw/rw - log pl/rl)"
PAIR_LOSSES: dict[PairLossName, PairLoss] = {
    "sigmoid": PairLoss(
        compute=sigmoid,
        formula=f"-(1-e) log s(m) - e log s(-m), {_MARGIN}, e = dpo.label_smoothing",
        source="DPO: Rafailov et al. 2023; e: cDPO, Mitchell 2023",
        use="the default",
    ),
    "ipo": PairLoss(
        compute=ipo,
        formula="(log pw/rw / nw - log pl/rl / nl - 1 / (2 beta))²",
        source="IPO: Azar et al. 2023, with means over tokens",
        use="does not drive margins without end where labels are certain",
    ),
    "hinge": PairLoss(
        compute=hinge,
        formula=f"max(0, 1 - m), {_MARGIN}",
        source="SLiC: Zhao et al. 2023; RSO: Liu et al. 2023",
        use="pairs that are told apart well enough add nothing",
    ),
    "robust": PairLoss(
        compute=robust,
        formula=f"(-(1-e) log s(m) + e log s(-m)) / (1 - 2e), {_MARGIN}",
        source="robust DPO: Chowdhury et al. 2024",
        use="a share e of the labels is wrong",
    ),
    "mpo": PairLoss(
        compute=mpo,
        formula="0.8 sigmoid + 0.2 (-log s(mw - d) - log s(d - ml)) + SFT; mw, ml the two implicit rewards, d their "
        "mean over the run so far",
        source="MPO: Wang et al. 2024 (InternVL); BCO: Jung et al. 2024",
        use="reasoning with pictures; the SFT term keeps the chosen answer's logprob up",
    ),
    "orpo": PairLoss(
        compute=orpo,
        formula="SFT - beta log s(o(w) - o(l)), o(y) = a - log(1 - exp a), a = log p/n",
        source="ORPO: Hong et al. 2024",
        use="SFT and preferences at once, without a reference",
    ),
    "simpo": PairLoss(
        compute=simpo,
        formula="-log s(beta (log pw/nw - log pl/nl) - dpo.gamma)",
        source="SimPO: Meng et al. 2024",
        use="without a reference; does not favour long answers",
    ),
    "cpo": PairLoss(
        compute=sigmoid,
        formula="SFT - log s(beta (log pw - log pl))",
        source="CPO: Xu et al. 2024",
        use="without a reference; its SFT term takes the reference's place",
    ),
}


def kto_losses(rewards_B: Tensor, desirable_B: Tensor, divergence: Tensor | float, kto: Kto) -> Tensor:
    """Compute KTO's loss of labelled answers (B,): weight * (1 - s(+-(reward - z))), with the sign and weight of the
    label and z = beta * `divergence`, an estimate of the policy's KL from the reference, at least 0 (Ethayarajh et al.
    2024). `rewards_B`: beta (log p - log r)."""
    margins_B = rewards_B - kto.beta * divergence
    wanted_B = (1 - margins_B.sigmoid()) * kto.desirable_weight
    unwanted_B = (1 - (-margins_B).sigmoid()) * kto.undesirable_weight
    return wanted_B.where(desirable_B, unwanted_B)


def log1mexp(values: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) of x < 0 without cancellation (Maechler 2012)."""
    values = values.clamp(max=-1e-7)  # a logprob of 0 would have infinite odds
    near, far = (-values.expm1()).log(), (-values.exp()).log1p()
    return near.where(values > -math.log(2), far)


def ranking_losses(values_B2: Tensor, margins_B: Tensor, centre_coef: float) -> Tensor:
    """Compute the Bradley-Terry loss of a reward model (B,): -log s(v_w - v_l - margin) + centre_coef (v_w + v_l)²; the
    second term is that of Eisenstein et al. 2023."""
    losses_B = -logsigmoid(values_B2[:, 0] - values_B2[:, 1] - margins_B)
    return losses_B + centre_coef * values_B2.sum(1) ** 2
