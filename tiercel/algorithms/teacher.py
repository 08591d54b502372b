"""The teacher: another model, whose next-token distribution the policy is trained towards.

p is the policy's distribution at a token and q the teacher's. Both cover the whole vocabulary, or the teacher's most
likely words and one more outcome for all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tiercel.algorithms.types import Described
from tiercel.config_base import PositiveFloat, PositiveInt, Source

if TYPE_CHECKING:
    from torch import Tensor


def reverse_kl(policy_MV: Tensor, teacher_MV: Tensor, mix: float) -> Tensor:
    """Compute sum p (ln p - ln q): (M,)."""
    return (policy_MV.exp() * (policy_MV - teacher_MV)).sum(-1)


def forward_kl(policy_MV: Tensor, teacher_MV: Tensor, mix: float) -> Tensor:
    """Compute sum q (ln q - ln p): (M,)."""
    return reverse_kl(teacher_MV, policy_MV, mix)


def jsd(policy_MV: Tensor, teacher_MV: Tensor, mix: float) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence (M,), with m = mix q + (1 - mix) p."""
    mixed_MV = (teacher_MV + math.log(mix)).logaddexp(policy_MV + math.log(1 - mix))
    return mix * reverse_kl(teacher_MV, mixed_MV, mix) + (1 - mix) * reverse_kl(policy_MV, mixed_MV, mix)


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence(Described):
    """How far the policy is from the teacher at a token."""

    of: Callable[[Tensor, Tensor, float], Tensor] | None  # from logprobs (M, V); None: from the sampled token alone


DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": Divergence(
        of=reverse_kl,
        formula="Σ p (ln p - ln q)",
        source="MiniLLM: Gu et al. 2024; Agarwal et al. 2024",
        use="the default: the student keeps to what the teacher finds likely",
    ),
    "forward_kl": Divergence(
        of=forward_kl,
        formula="Σ q (ln q - ln p)",
        source="Hinton et al. 2015",
        use="the student covers all that the teacher does; usual on answers of rows",
    ),
    "jsd": Divergence(
        of=jsd,
        formula="mix KL(q ‖ m) + (1 - mix) KL(p ‖ m), m = mix q + (1 - mix) p",
        source="GKD: Agarwal et al. 2024",
        use="between the two; bounded",
    ),
    "token": Divergence(
        of=None,
        formula="(ln p - ln q)² / 2 at the drawn token, whose gradient is that of the reward ln q - ln p at each token",
        source="Schulman 2020, k2; Lu 2025, On-policy distillation",
        use="needs no distribution, and less memory; a reward for every token beside those of `rewards`",
    ),
}

if TYPE_CHECKING:
    DivergenceName = str
else:
    DivergenceName = Literal[tuple(DIVERGENCES)]


class Teacher(Source):
    """A frozen model that sees what the policy wrote. It needs the policy's tokenizer; its family and its pixels may be
    others. Every rank holds it whole, unless a server computes it."""

    url: str | None = None
    """Address of a vLLM server that computes it from the checkpoint at `path`, of which tiercel reads no weights then,
    such as http://127.0.0.1:8000 (docs/vllm.md). The server's key is read from VLLM_API_KEY."""
    adapter: str | None = None
    """Directory of an adapter on it, such as a run's checkpoints/step-000100/adapter; null has none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of its weights and its pass."""
    max_pixels: PositiveInt | None = None
    """As model.max_pixels, for the teacher's own picture, which may be larger."""
    template: str | None = None
    """File with the teacher's chat template; null takes the one of its checkpoint."""
    prompt: str | None = None
    """What the teacher is asked instead of the last question: text with {prompt}, {answer} and names of columns, such
    as "{prompt} The answer is {answer}."; null asks the same."""
    divergence: DivergenceName = "reverse_kl"
    """What is made smaller at each token (docs/algorithms.md)."""
    mix: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture of jsd."""
    top_k: PositiveInt | None = None
    """How many of the teacher's most likely words are compared one by one; all others count as one. null: the whole
    vocabulary."""
    coef: PositiveFloat = 1.0
    """Weight in the loss; the policy's other terms have 1."""


class RowsTeacher(Teacher):
    """The teacher of `tiercel distill`, which also reads what rows answer."""

    rows_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the prompts whose completion is the row's own answer instead of the policy's: 0 is all on policy, 1
    all off policy (1 - lambda of GKD). The answer stands for all rollout.group_size completions of its prompt."""
