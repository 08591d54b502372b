"""The recipe's section `algorithm`: the keys of its parts, each declared with its part, and keys that span them."""

from typing import Annotated, Literal

from pydantic import Field

from tiercel.algorithms.advantages import AdvantageKeys
from tiercel.algorithms.correction import Correction
from tiercel.algorithms.custom import ADVANTAGE_KEY, LOSS_KEY, forget_own_functions, own_function
from tiercel.algorithms.kl import Kl
from tiercel.algorithms.losses import LossKeys
from tiercel.algorithms.surrogates import SurrogateKeys
from tiercel.algorithms.teacher import Teacher
from tiercel.config_base import NonNegativeFloat, PositiveFloat


class Algorithm(SurrogateKeys, AdvantageKeys, LossKeys):  # pydantic lists the keys of the last base first
    """The policy-gradient loss and its advantages; docs/algorithms.md has the formulas."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the policy's entropy, which the loss then rewards."""
    entropy_mean: Literal["loss", "token"] = "loss"
    """The mean that the entropy is taken by: that of the loss (normalise), or over all tokens of the minibatch, which
    dr_grpo's constant or a sum does not scale (as in TRL)."""
    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the minibatch's tokens that the policy term learns from, those of the highest entropy (Wang et al.
    2025, "Beyond the 80/20 rule"); below 1 it takes a pass before the update."""
    top_entropy_of: Literal["learnt", "all"] = "learnt"
    """The tokens that top_entropy is a share of: those of completions with an advantage, as in the paper, whose DAPO
    samples until all have one; or all of the minibatch, as in TRL, which then all take both passes."""
    overlong: Literal["keep", "mask"] = "keep"
    """mask: truncated completions count in the baseline of their group, but the policy does not learn from them (DAPO
    2025); keep: it does."""
    off_policy_delta: PositiveFloat | None = None
    """Completions with a negative advantage whose mean of (sampler's - policy's logprob) is above this are left out of
    the policy term (DeepSeek-V3.2 2025); null is off."""
    kl: Kl = Kl()
    correction: Correction = Correction()
    teacher: Teacher | None = None


def own_calls(algorithm: Algorithm) -> dict[str, str]:
    """Return the user's own functions that a recipe names, by key."""
    chosen = {LOSS_KEY: algorithm.loss, ADVANTAGE_KEY: algorithm.advantage}
    return {key: each.call for key, each in chosen.items() if not isinstance(each, str)}


def load_own_functions(algorithm: Algorithm) -> None:
    """Load the user's own functions that a recipe names, as their files are now. Raises RecipeError if one cannot be
    loaded."""
    forget_own_functions()
    for key, call in own_calls(algorithm).items():
        own_function(key, call)
