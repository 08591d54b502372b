"""The recipe's section `sft`, and the losses of an answer's tokens, as pure functions of logprobs that do not import
torch.

N is the number of scored tokens; p is the policy's probability of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tiercel.algorithms.types import Described
from tiercel.sections import PositiveFloat, Section

if TYPE_CHECKING:
    from torch import Tensor

TokenLossName = Literal["nll", "dft"]


class Sft(Section):
    """How `tiercel sft` learns from the assistant turns. Held-out rows are judged by the plain loss, without any of
    these."""

    loss: TokenLossName = "nll"
    """nll: the mean negative logprob of the tokens; dft weighs each token by its own probability, through which no
    gradient goes (Wu et al. 2025)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share e of a token's target that all words have alike (Szegedy et al. 2016): the loss is (1-e) times that of the
    token plus e times the mean over the words."""
    neftune_alpha: PositiveFloat | None = None
    """Size of the noise on embeddings (NEFTune: Jain et al. 2023): even within +-alpha / sqrt(L d), L a row's tokens, d
    their width; a function of train.seed and of the row's place in the order. null adds none."""

    @property
    def is_plain(self) -> bool:
        """Return whether the loss is the plain mean negative logprob."""
        return self == Sft()


def nll(logprobs_N: Tensor) -> Tensor:
    """Compute the negative logprobs (N,)."""
    return -logprobs_N


def dft(logprobs_N: Tensor) -> Tensor:
    """Compute dynamic fine-tuning's loss (N,): -p log p, where the factor p is detached, so the gradient is that of
    -p."""
    return -logprobs_N.detach().exp() * logprobs_N


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLoss(Described):
    """A loss of tokens."""

    compute: Callable[[Tensor], Tensor]


TOKEN_LOSSES: Mapping[TokenLossName, TokenLoss] = {
    "nll": TokenLoss(compute=nll, formula="-log p", source="maximum likelihood", use="the default"),
    "dft": TokenLoss(
        compute=dft,
        formula="-sg(p) log p, sg(p) the probability without a gradient",
        source="DFT: Wu et al. 2025",
        use="the gradient of p itself: unlikely tokens do not pull hardest, so that answers unlike the model's own "
        "spoil less of what it knows",
    ),
}
