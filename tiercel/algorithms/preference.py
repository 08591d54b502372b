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
from tiercel.algorithms.types import Described


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
    "exo_pair": PairLoss(
        compute=exo,
        formula=f"s(m) (log s(m) - log(1-e)) + s(-m) (log s(-m) - log e), {_MARGIN}, e above 0",
        source="EXO: Ji et al. 2024, equation 16",
        use="the reverse divergence of the policy's preferences from the labels: it seeks one mode",
    ),
    "nca_pair": PairLoss(
        compute=nca,
        formula="-log s(mw) - (log s(-mw) + log s(-ml)) / 2, mw, ml the two implicit rewards",
        source="NCA: Chen et al. 2024",
        use="the chosen answer's logprob must not fall",
    ),
    "bco_pair": PairLoss(
        compute=bco,
        formula="-log s(mw - d) - log s(d - ml), d the mean of the implicit rewards over the run so far",
        source="BCO: Jung et al. 2024",
        use="each answer is judged by itself; the pairs may be of unequal quality",
    ),
    "sppo_hard": PairLoss(
        compute=sppo,
        formula="(log pw/rw - 1 / (2 beta))² + (log pl/rl + 1 / (2 beta))²",
        source="SPPO: Wu et al. 2024, equation 4.7 with probabilities 1 and 0",
        use="log ratios have a definite aim, which bounds them",
    ),
    "apo_zero": PairLoss(
        compute=apo_zero,
        formula="1 - s(mw) + s(ml)",
        source="APO: D'Oosterlinck et al. 2024, equation 7",
        use="the chosen answers are better than what the model writes",
    ),
    "apo_down": PairLoss(
        compute=apo_down,
        formula="s(mw) + 1 - s(mw - ml)",
        source="APO: D'Oosterlinck et al. 2024, equation 8",
        use="the chosen answers are worse than what the model writes",
    ),
    "discopop": PairLoss(
        compute=discopop,
        formula=f"-(1 - s(m/t)) log s(m) + s(m/t) exp(-m), {_MARGIN}, t = dpo.tau",
        source="DiscoPOP: Lu et al. 2024, equation 5",
        use="a loss that a search found; not convex",
    ),
    "aot": PairLoss(
        compute=aot,
        formula="-(1-e) log s(d) - e log s(-d), d = beta ((log pw - log pl) - (log rw - log rl)'), where ' is the "
        "margin of the same place in the order of all margins of the step on all ranks",
        source="AOT: Melnyk et al. 2024, paired",
        use="margins are to be higher as a distribution, not pair by pair; takes a pass of the policy before the "
        "update",
    ),
    "aot_unpaired": PairLoss(
        compute=aot_unpaired,
        formula="-(1-e) log s(d) - e log s(-d), d = beta (log pw/rw - (log pl/rl)'), where ' is the ratio of the same "
        "place in the order of those of all rejected answers of the step on all ranks",
        source="AOT: Melnyk et al. 2024, unpaired",
        use="chosen answers are to be better than rejected ones as a distribution, whatever question they answer; "
        "takes a pass of the policy before the update",
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
    "cpo_ipo": PairLoss(
        compute=ipo,
        formula="SFT + (log pw / nw - log pl / nl - 1 / (2 beta))²",
        source="CPO: Xu et al. 2024, with the square of IPO",
        use="as `cpo`; margins do not grow without end",
    ),
    "cpo_hinge": PairLoss(
        compute=hinge,
        formula="SFT + max(0, 1 - beta (log pw - log pl))",
        source="CPO: Xu et al. 2024, with the hinge of SLiC",
        use="as `cpo`; pairs that are told apart well enough add nothing but SFT",
    ),
}


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
