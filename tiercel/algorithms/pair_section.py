"""The recipe's sections `dpo`, `kto` and `ranking`."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from tiercel.sections import NonNegativeFloat, PositiveFloat, Section

PairLossName = Literal["sigmoid", "ipo", "hinge", "robust", "mpo", "orpo", "simpo", "cpo"]
PAIR_LOSS_NAMES: tuple[PairLossName, ...] = get_args(PairLossName)
WITHOUT_REFERENCE: tuple[PairLossName, ...] = ("orpo", "simpo", "cpo")
WITH_SFT: tuple[PairLossName, ...] = ("mpo", "orpo", "cpo")  # SFT is a term of the loss as published
OF_MEANS: tuple[PairLossName, ...] = ("ipo", "simpo", "orpo")  # logprobs are averaged over tokens
SMOOTHED: tuple[PairLossName, ...] = ("sigmoid", "robust", "mpo", "simpo", "cpo")


class Dpo(Section):
    """How `tiercel dpo` learns from preference pairs."""

    loss: PairLossName
    """The loss of a pair (docs/algorithms.md)."""
    beta: PositiveFloat = 0.1
    """Scale of the implicit rewards; for orpo the weight of its odds-ratio term."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose label may be wrong."""
    length_normalised: bool = False
    """Compare logprobs averaged over an answer's tokens, not sums; ipo, simpo and orpo always do."""
    gamma: NonNegativeFloat | None = None
    """simpo: the margin of rewards that is wanted; null takes 0.5."""
    sft_coef: NonNegativeFloat | None = None
    """Weight of the chosen answers' mean negative logprob per token; null takes 1 for mpo, orpo and cpo, else 0."""
    precompute_reference: bool = False
    """Compute the reference's logprobs of all pairs before the first step and keep them in the run directory, so that
    no step computes them again."""

    @property
    def has_reference(self) -> bool:
        """Tell whether the loss compares the policy with the reference."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def compares_means(self) -> bool:
        """Tell whether logprobs are averaged over tokens."""
        return self.length_normalised or self.loss in OF_MEANS

    @property
    def wanted_margin(self) -> float:
        """Return SimPO's margin."""
        return 0.5 if self.gamma is None else self.gamma

    @property
    def sft_weight(self) -> float:
        """Return the weight of the SFT term."""
        return float(self.loss in WITH_SFT) if self.sft_coef is None else self.sft_coef


class Kto(Section):
    """How `tiercel kto` learns from answers that are labelled one by one."""

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
