"""Losses by name. Each is a ratio, a surrogate of it and a normaliser, and a recipe can also name each of the
three. policy_loss.py adds the KL and entropy terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Tag

from tiercel.algorithms import completions
from tiercel.algorithms.ratios import RATIOS, RatioName
from tiercel.algorithms.surrogates import SURROGATES, SurrogateName
from tiercel.algorithms.types import Described, LossInput
from tiercel.config_base import SECTION_FORM, TEXT_FORM, Section, form_of

if TYPE_CHECKING:
    from torch import Tensor


def per_sequence(batch: LossInput) -> Tensor:
    """Weight each token by 1 / (tokens of its completion x completions)."""
    lengths_C = completions.lengths(batch.completion_of_N, len(batch.advantages_C)).to(batch.logprobs_N.dtype)
    return 1.0 / (lengths_C[batch.completion_of_N] * batch.totals.completions)


def per_token(batch: LossInput) -> Tensor:
    """Weight each token by 1 / tokens of the minibatch."""
    return _everywhere(batch, 1.0 / max(1, batch.totals.tokens))


def per_constant(batch: LossInput) -> Tensor:
    """Weight each token by 1 / (longest x completions), so that no weight depends on a sampled length; `longest` is
    rollout.max_new_tokens, or rollout.max_trajectory_tokens with turns."""
    return _everywhere(batch, 1.0 / (batch.longest * max(1, batch.totals.completions)))


def per_completion(batch: LossInput) -> Tensor:
    """Weight each token by 1 / completions."""
    return _everywhere(batch, 1.0 / max(1, batch.totals.completions))


def _everywhere(batch: LossInput, factor: float) -> Tensor:
    return batch.logprobs_N.new_full(batch.logprobs_N.shape, factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normaliser(Described):
    """A mean that a loss can use."""

    of: Callable[[LossInput], Tensor]  # -> (N,), detached


NORMALISERS: dict[str, Normaliser] = {
    "sequence": Normaliser(
        of=per_sequence,
        formula="mean over each completion's tokens, then over completions",
        source="DeepSeekMath 2024",
        use="short and long completions weigh the same",
    ),
    "token": Normaliser(
        of=per_token,
        formula="mean over all tokens of the minibatch",
        source="DAPO: Yu et al. 2025",
        use="every token weighs the same, so long completions weigh more",
    ),
    "constant": Normaliser(
        of=per_constant,
        formula="sum over tokens / (completions x `rollout.max_new_tokens`, with turns `max_trajectory_tokens`)",
        source="Dr. GRPO: Liu et al. 2025",
        use="no weight depends on a length, so long wrong completions are not favoured",
    ),
    "sum": Normaliser(
        of=per_completion,
        formula="sum over each completion's tokens, mean over completions",
        source="LUSPO: Liu et al. 2026",
        use="with `ratio: sequence`, where a completion weighs as much as it is long",
    ),
}

if TYPE_CHECKING:
    NormaliserName = str
else:
    NormaliserName = Literal[tuple(NORMALISERS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A loss as it was published: names of RATIOS, SURROGATES and NORMALISERS."""

    ratio: str
    surrogate: str
    normalise: str
    source: str
    use: str

    @property
    def formula(self) -> str:
        """Return the formulas of its three parts."""
        parts = SURROGATES[self.surrogate].formula, RATIOS[self.ratio].formula, NORMALISERS[self.normalise].formula
        return "; ".join(parts)


LOSSES: dict[str, Loss] = {
    "grpo": Loss(
        ratio="token",
        surrogate="clipped",
        normalise="sequence",
        source="DeepSeekMath 2024, equation 3",
        use="the default; short and long completions weigh the same",
    ),
    "bnpo": Loss(
        ratio="token",
        surrogate="clipped",
        normalise="token",
        source="TRL's and ms-swift's `bnpo`",
        use="TRL and ms-swift take the mean over each device's microbatch; tiercel's batch is the minibatch over all "
        "ranks, so it equals `dapo`",
    ),
    "dr_grpo": Loss(
        ratio="token",
        surrogate="clipped",
        normalise="constant",
        source="Dr. GRPO: Liu et al. 2025",
        use="no bias towards long wrong completions; goes with `advantage: group_centred`",
    ),
    "dapo": Loss(
        ratio="token",
        surrogate="clipped",
        normalise="token",
        source="DAPO: Yu et al. 2025",
        use="long chains of thought; goes with `clip_high: 0.28`, `rollout.resample_tries` and the reward "
        "`soft_overlong`",
    ),
    "gspo": Loss(
        ratio="sequence",
        surrogate="clipped",
        normalise="sequence",
        source="GSPO: Zheng et al. 2025",
        use="mixtures of experts and long completions; bounds are far narrower, such as 3e-4 and 4e-4",
    ),
    "gspo_token": Loss(
        ratio="sequence_at_token",
        surrogate="clipped",
        normalise="sequence",
        source="GSPO-token: Zheng et al. 2025",
        use="as `gspo` if tokens of a completion weigh differently (`top_entropy`, a correction by token)",
    ),
    "cispo": Loss(
        ratio="token",
        surrogate="weighted",
        normalise="token",
        source="CISPO: MiniMax-M1 2025",
        use="several updates per rollout if rare tokens matter; goes with `clip_low: null` and a wide `clip_high`",
    ),
    "sapo": Loss(
        ratio="token",
        surrogate="gated",
        normalise="sequence",
        source="SAPO: Gao et al. 2025",
        use="instead of clipping if bounds are hard to tune",
    ),
    "vespo": Loss(
        ratio="product",
        surrogate="gamma",
        normalise="token",
        source="VESPO: Shen et al. 2026",
        use="completions of much older policies; a smooth weight of the whole completion, without its length",
    ),
    "luspo": Loss(
        ratio="sequence",
        surrogate="clipped",
        normalise="sum",
        source="LUSPO: Liu et al. 2026",
        use="as `gspo`, whose mean over tokens makes long completions count less by token; bounds as narrow as "
        "those of `gspo`",
    ),
}

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


class OwnLoss(Section):
    """A loss of your own (docs/algorithms.md)."""

    call: str
    """file.py:function or package.module:function; it takes a LossInput, returns what is minimised at each token, and
    runs in the trainer's process."""


class LossKeys(Section):
    """Keys of the recipe that choose the loss."""

    loss: Annotated[
        Annotated[LossName, Tag(TEXT_FORM)] | Annotated[OwnLoss, Tag(SECTION_FORM)], Discriminator(form_of)
    ] = "grpo"
    """What is minimised: a ratio, a surrogate of it and a mean over tokens; or your own by {call: file.py:function}."""
    ratio: RatioName | None = None
    """The ratio of the policy to the old policy; null: as the loss was published."""
    surrogate: SurrogateName | None = None
    """What is minimised at each token; null: as the loss was published."""
    normalise: NormaliserName | None = None
    """Mean over each completion's tokens, then over completions; over all tokens of the minibatch; the sum over
    rollout.max_new_tokens (with turns max_trajectory_tokens) x completions; or the sum over completions. null: as the
    loss was published; sequence for your own."""

    @property
    def normaliser_name(self) -> str:
        """Return the name of the mean that the loss uses."""
        return self.normalise or (LOSSES[self.loss].normalise if isinstance(self.loss, str) else "sequence")

    @property
    def parts(self) -> Loss | None:
        """Return the loss with the parts that the recipe overrides, or None for a user's own loss."""
        if not isinstance(self.loss, str):
            return None
        named = LOSSES[self.loss]
        return replace(
            named,
            ratio=self.ratio or named.ratio,
            surrogate=self.surrogate or named.surrogate,
            normalise=self.normaliser_name,
        )
