"""The recipe's sections `dpo`, `kto` and `ranking`."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from tiercel.algorithms.f_divergences import FDivergenceName
from tiercel.config_base import NonNegativeFloat, PositiveFloat, Section

PairLossName = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "aot_unpaired",
    "mpo",
    "orpo",
    "simpo",
    "cpo",
    "cpo_ipo",
    "cpo_hinge",
]
PAIR_LOSS_NAMES: tuple[PairLossName, ...] = get_args(PairLossName)
WITHOUT_REFERENCE: tuple[PairLossName, ...] = ("orpo", "simpo", "cpo", "cpo_ipo", "cpo_hinge")
WITH_SFT: tuple[PairLossName, ...] = (
    "mpo",
    "orpo",
    "cpo",
    "cpo_ipo",
    "cpo_hinge",
)  # the published loss has an SFT term
OF_MEANS: tuple[PairLossName, ...] = ("ipo", "simpo", "orpo", "cpo_ipo")  # logprobs are averaged over tokens
SMOOTHED: tuple[PairLossName, ...] = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "mpo", "simpo", "cpo")
MATCHED: tuple[PairLossName, ...] = ("aot", "aot_unpaired")  # the compared values are matched over the whole step
OF_DIVERGENCES: tuple[PairLossName, ...] = ("sigmoid", "hinge", "robust", "exo_pair", "discopop")


class Dpo(Section):
    """How `tiercel dpo` learns from preference pairs."""

    loss: PairLossName
    """The loss of a pair (docs/algorithms.md)."""
    beta: PositiveFloat = 0.1
    """Scale of the implicit rewards; for orpo the weight of its odds-ratio term."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose label may be wrong; exo_pair needs one above 0, such as 0.001."""
    length_normalised: bool = False
    """Compare logprobs averaged over an answer's tokens, not sums; ipo, cpo_ipo, simpo and orpo always do."""
    ld_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the logprobs of an answer's tokens beyond the length of the pair's shorter answer (LD-DPO: Liu et al.
    2024), of the policy and of the reference; null is 1."""
    divergence: FDivergenceName = "reverse_kl"
    """The divergence from the reference that bounds the policy (docs/algorithms.md)."""
    divergence_alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """divergence alpha: where it is between reverse_kl (near 0) and forward_kl (near 1); null takes 0.5."""
    wpo: bool = False
    """Weigh each pair by how much its answers are like the policy's own (WPO: Zhou et al. 2024): by exp of the mean,
    over an answer's tokens, of log p less the log of the sum of p² over all words, for both answers. Held-out pairs are
    not weighed."""
    gamma: NonNegativeFloat | None = None
    """simpo: the margin of rewards that is wanted; null takes 0.5. Over beta it is in nats per token: the paper takes
    0.3 to 0.5 of them, with a beta of 2 to 2.5; TRL's defaults, which are those here, 5."""
    tau: PositiveFloat | None = None
    """discopop: how narrow the passage between its two parts is; null takes 0.05."""
    sft_coef: NonNegativeFloat | None = None
    """Weight of the chosen answers' mean negative logprob per token; null takes 1 for mpo, orpo and those of cpo, else
    0."""
    precompute_reference: bool = False
    """Compute the reference's logprobs of all pairs before the first step and keep them in the run directory, so that
    no step computes them again."""

    @property
    def has_reference(self) -> bool:
        """Return whether the loss compares the policy with the reference."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def compares_means(self) -> bool:
        """Return whether logprobs are averaged over tokens."""
        return self.length_normalised or self.loss in OF_MEANS

    @property
    def wanted_margin(self) -> float:
        """Return SimPO's margin."""
        return 0.5 if self.gamma is None else self.gamma

    @property
    def power(self) -> float:
        """Return the alpha of the divergence."""
        return 0.5 if self.divergence_alpha is None else self.divergence_alpha

    @property
    def passage(self) -> float:
        """Return DiscoPOP's temperature."""
        return 0.05 if self.tau is None else self.tau

    @property
    def sft_weight(self) -> float:
        """Return the weight of the SFT term."""
        return float(self.loss in WITH_SFT) if self.sft_coef is None else self.sft_coef


class Kto(Section):
    """How `tiercel kto` learns from answers that are labelled one by one."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto; or apo_zero_unpaired, which compares with no divergence and computes none (D'Oosterlinck et al. 2024)."""
    beta: PositiveFloat = 0.1
    """Scale of the implicit rewards."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of answers whose label is true."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of answers whose label is false."""


class Ranking(Section):
    """How `tiercel reward` learns values from preference pairs, by Bradley and Terry's model."""

    margin: NonNegativeFloat = 0.0
    """By how much the chosen answer's value is to be higher."""
    margin_column: str | None = None
    """Column with a margin for each row, which is added to ranking.margin, such as a difference of ratings."""
    centre_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's two values, which keeps values around 0."""
