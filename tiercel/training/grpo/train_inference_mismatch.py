"""Detection, during training, of an engine whose logprobs no longer are the learner's: the run ends before the update.

The check before the first step (the gate, engine_logprob_check.py) compares some two hundred tokens with
rollout.parity_tolerance.
After that, the policy pass compares every token that it learns from, before the optimiser step and without a pass of
its own. Over so many tokens the largest gap is not a useful measure: in bfloat16 a healthy run has one of 0.25 or more
in most steps. So tokens are counted: those whose gap is far beyond what the gate expects (FAR), and those beyond all
that rounding can do (EXTREME). An engine is wrong if a SHARE of the tokens is far off, and not just a FEW of a short
step, or if one token is extremely off. At most one in a hundred of the gate's tokens was beyond one tolerance; four
tolerances at 5 % of the tokens means a different engine.

Other differences of a healthy run are allowed for. With rollout.lookahead the completions are that many updates old,
and with lora.dropout the learner's pass draws a mask: DRIFT nats are expected on top for each. With rollout.top_p or
rollout.top_k vLLM gives the logprob among the tokens that were left, which is above the policy's own, so only an engine
logprob below it counts. Groups that the learner leaves out because their advantages are all 0 are not compared: nothing
is learnt from them.

Shape suffix: N scored tokens of a microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tiercel.config.schema import GrpoRecipe
from tiercel.errors import TrainingError
from tiercel.log import logger
from tiercel.reliability.redaction import redact

FAR, EXTREME = 4.0, 100.0  # times the expected gap
DRIFT = 0.5  # nats by which an update, or a dropout mask, may move a token's logprob
SHARE = 0.05  # of the tokens
FEW = 3  # tokens
GAP_SUM, GAP_TOKENS = "gap/sum", "gap/tokens"
FAR_TOKENS, EXTREME_TOKENS = "gap/far", "gap/extreme"
LARGEST_GAP = "sampler/logprob_gap_max"


@dataclass(frozen=True, kw_only=True, slots=True)
class GapLimits:
    """Limits of the gap between engine and learner, in nats."""

    far: float
    extreme: float
    is_cut: bool  # the engine's logprobs come from a truncated distribution


def gap_limits(recipe: GrpoRecipe) -> GapLimits:
    """Compute the limits that this module's docstring explains."""
    rollout = recipe.rollout
    has_dropout = recipe.lora is not None and recipe.lora.dropout > 0
    expected = parity_tolerance(recipe) + DRIFT * max(rollout.lookahead, has_dropout)
    is_cut = not rollout.engine_kind.shares_weights and (rollout.top_p < 1 or rollout.top_k > 0)
    return GapLimits(far=FAR * expected, extreme=EXTREME * expected, is_cut=is_cut)


def parity_tolerance(recipe: GrpoRecipe) -> float:
    """Return the recipe's tolerance, or the default for its dtype."""
    if recipe.rollout.parity_tolerance is not None:
        return recipe.rollout.parity_tolerance
    return 1e-3 if recipe.model.dtype == "float32" else 0.25


def gap_counts(gaps_N: Tensor, is_known_N: Tensor, limits: GapLimits) -> dict[str, Tensor]:
    """Return sums over tokens by how far the engine's logprob is below the learner's, which add up over microbatches
    and ranks. The gap is 0 at the tokens where `is_known_N` (bool) is false."""
    excess_N = gaps_N if limits.is_cut else gaps_N.abs()
    return {
        GAP_SUM: gaps_N.abs().sum(),
        GAP_TOKENS: is_known_N.sum(),
        FAR_TOKENS: (excess_N > limits.far).sum(),
        EXTREME_TOKENS: (excess_N > limits.extreme).sum(),
    }


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return sampler/logprob_gap_mean, and sampler/gap_far_fraction, the share of tokens that are far off; empty if no
    token's sampler logprob is known."""
    known = sums.get(GAP_TOKENS, 0.0)
    if not known:
        return {}
    return {"sampler/logprob_gap_mean": sums[GAP_SUM] / known, "sampler/gap_far_fraction": sums[FAR_TOKENS] / known}


def require_near(recipe: GrpoRecipe, step: int, sums: Mapping[str, float], largest: Mapping[str, float]) -> None:
    """Raise TrainingError on all ranks, from the sums of all ranks, if the engine is wrong and rollout.parity_action is
    stop."""
    if recipe.rollout.parity_action == "stop" and (problem := gap_problem(recipe, sums, largest)) is not None:
        raise TrainingError(
            f"step {step + 1}: {problem}; this update was not made; {recipe.rollout.engine_kind.remedy}, and run the "
            "same command again to resume from the newest checkpoint; to go on despite this, set "
            "rollout.parity_action: warn"
        )


def warn_of_gap(recipe: GrpoRecipe, step: int, sums: Mapping[str, float], largest: Mapping[str, float]) -> None:
    """Warn once per step, from the sums of its updates."""
    if recipe.rollout.parity_action == "warn" and (problem := gap_problem(recipe, sums, largest)) is not None:
        logger.warning(
            f"warning: step {step + 1}: {problem}; the update was made, because rollout.parity_action is warn"
        )


def gap_problem(recipe: GrpoRecipe, sums: Mapping[str, float], largest: Mapping[str, float]) -> str | None:
    """Say in figures what is wrong with the engine; None if nothing is."""
    known, far, extreme = (sums.get(name, 0.0) for name in (GAP_TOKENS, FAR_TOKENS, EXTREME_TOKENS))
    if not extreme and far <= max(FEW, SHARE * known):
        return None
    limits = gap_limits(recipe)
    return (
        f"{engine_name(recipe)}: its logprobs are no longer the learner's: of {known:,.0f} tokens {far:,.0f} are off "
        f"by more than {limits.far:.3g} and {extreme:,.0f} by more than {limits.extreme:.3g}, the mean gap is "
        f"{sums[GAP_SUM] / known:.3g}, the largest {largest.get(LARGEST_GAP, 0.0):.3g} "
        f"(rollout.parity_tolerance: {parity_tolerance(recipe):g})"
    )


def engine_name(recipe: GrpoRecipe) -> str:
    """Name the engine for a message."""
    rollout = recipe.rollout
    servers = f" ({redact(', '.join(rollout.urls))})" if rollout.engine_kind.is_served else ""
    return f"rollout.engine: {rollout.engine}{servers}"
