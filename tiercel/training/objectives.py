"""What each verb learns from the answers in its rows: what it computes before an update, and the loss of a pass.

A step's examples are bundled and shared out over the ranks. An objective makes a Plan of them, which holds what it
needs to know of the whole step. Then each pass gives its share of the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tiercel.algorithms import completions
from tiercel.algorithms.pair_section import Dpo, Kto, Ranking
from tiercel.algorithms.pairs import PAIR_LOSSES, PairInput, kto_losses, ranking_losses
from tiercel.config.schema import DpoRecipe, KtoRecipe, OfflineRecipe, RewardRecipe
from tiercel.data.preferences import wanted_margin
from tiercel.learner.examples import Bundle
from tiercel.learner.head import TokenScores
from tiercel.training.forward import ExamplePass, Passes
from tiercel.training.minibatches import bundled
from tiercel.types import Example

Known = Mapping[int, Tensor]  # by the example's index: fp32, a number for each of its conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What an update learns from, and what is known before it."""

    made: Sequence[Bundle]  # of this rank
    examples: int  # of all ranks
    tokens: int  # scored ones of all ranks
    first_tokens: int  # scored ones of the examples' first conversations, of all ranks
    reference: Known = field(default_factory=dict)  # logprobs of the answers, summed over their tokens
    divergence: float = 0.0  # KTO's: of the policy from the reference, nats per answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a pass adds to the loss, and to the sums that metrics are made of."""

    loss: Tensor  # with its graph
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # over examples
    values_B2: Tensor | None = None  # fp32, detached: how good each answer of a pair is found; None without pairs


class Objective(Protocol):
    """Learns from answers in rows."""

    state: dict[str, float]  # what later steps need of earlier ones; checkpoints keep it

    def plan(self, passes: Passes, made: Sequence[Bundle], reference: Known | None = None) -> Plan:
        """Compute what is needed before an update. All ranks call it together. `reference`: where it was computed
        before."""

    def share(self, each: ExamplePass, scores: TokenScores, plan: Plan) -> Share:
        """Compute what a pass adds."""

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        """Make keys of metrics.jsonl of the shares' sums over all ranks, and remember what `state` keeps."""


def objective_of(recipe: OfflineRecipe) -> Objective:
    """Make the objective of a recipe."""
    if isinstance(recipe, DpoRecipe):
        return Pairs(recipe.dpo)
    if isinstance(recipe, RewardRecipe):
        return Values(recipe.ranking)
    return Labels(recipe.kto) if isinstance(recipe, KtoRecipe) else Sft()


class _Plain:
    """Needs nothing before an update; its metrics are means over examples."""

    def __init__(self) -> None:
        self.state: dict[str, float] = {}

    def plan(self, passes: Passes, made: Sequence[Bundle], reference: Known | None = None) -> Plan:
        return _counted(passes, made)

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        return {name: value / max(1, examples) for name, value in sums.items()}


class Sft(_Plain):
    """The mean negative logprob of the scored tokens."""

    def share(self, each: ExamplePass, scores: TokenScores, plan: Plan) -> Share:
        return Share(loss=-scores.logprobs_N.sum() / max(1, plan.tokens))


class Pairs(_Plain):
    """A loss of pairs, and the mean negative logprob of the chosen answers where the recipe wants it."""

    def __init__(self, dpo: Dpo):
        self._dpo = dpo
        self.state = {"rewards": 0.0, "answers": 0.0}  # sum of the implicit rewards of the run's answers, their number

    def plan(self, passes: Passes, made: Sequence[Bundle], reference: Known | None = None) -> Plan:
        plan = _counted(passes, made)
        if not self._dpo.has_reference:
            return plan
        return replace(plan, reference=reference_sums(passes, made) if reference is None else reference)

    def share(self, each: ExamplePass, scores: TokenScores, plan: Plan) -> Share:
        dpo = self._dpo
        logprobs_B2, lengths_B2 = _by_answer(each, scores.logprobs_N)
        pairs = PairInput(
            logprobs_B2=logprobs_B2,
            reference_B2=_known(plan.reference, each, logprobs_B2) if dpo.has_reference else None,
            lengths_B2=lengths_B2,
            shift=self.state["rewards"] / max(1.0, self.state["answers"]),
        )
        losses_B, rewards_B2 = PAIR_LOSSES[dpo.loss].compute(pairs, dpo), pairs.rewards_B2(dpo).detach()
        loss = losses_B.sum() / max(1, plan.examples)
        if dpo.sft_weight:
            loss = loss - dpo.sft_weight * logprobs_B2[:, 0].sum() / max(1, plan.first_tokens)
        means_B2 = pairs.means_B2.detach()
        sums = {
            "pairs/reward_chosen": rewards_B2[:, 0].sum(),
            "pairs/reward_rejected": rewards_B2[:, 1].sum(),
            "pairs/logprob_chosen": means_B2[:, 0].sum(),
            "pairs/logprob_rejected": means_B2[:, 1].sum(),
        }
        return Share(loss=loss, sums=_ranking_sums(rewards_B2) | sums, values_B2=rewards_B2)

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        self.state["rewards"] += sums["pairs/reward_chosen"] + sums["pairs/reward_rejected"]
        self.state["answers"] += 2 * examples
        return super().metrics(sums, examples)


class Values(_Plain):
    """A reward model's, whose value of an answer is that at the state which predicts the answer's last token."""

    def __init__(self, ranking: Ranking):
        super().__init__()
        self._ranking = ranking

    def share(self, each: ExamplePass, scores: TokenScores, plan: Plan) -> Share:
        assert scores.values_N is not None
        values_B2 = completions.lasts(scores.values_N, each.packed.continuation_of_N).view(-1, 2)
        margins = [wanted_margin(example.row, self._ranking) for example in each.examples]
        losses_B = ranking_losses(values_B2, values_B2.new_tensor(margins), self._ranking.centre_coef)
        found_B2 = values_B2.detach()
        sums = {"pairs/reward_chosen": found_B2[:, 0].sum(), "pairs/reward_rejected": found_B2[:, 1].sum()}
        loss = losses_B.sum() / max(1, plan.examples)
        return Share(loss=loss, sums=_ranking_sums(found_B2) | sums, values_B2=found_B2)


class Labels(_Plain):
    """KTO. The second conversation of each example has another row's answer: on these the policy's divergence from the
    reference is estimated."""

    def __init__(self, kto: Kto):
        super().__init__()
        self._kto = kto

    def plan(self, passes: Passes, made: Sequence[Bundle], reference: Known | None = None) -> Plan:
        reference = reference_sums(passes, made) if reference is None else reference
        examples = [example for bundle in made for example in bundle.examples]
        policy = answer_sums(passes, bundled(passes, [_only(example, 1) for example in examples]))
        gaps = [float(policy[index][0] - reference[index][1]) for index in policy]
        sums = passes.ranks.sum({"gap": sum(gaps), "count": float(len(gaps))})
        own = bundled(passes, [_only(example, 0) for example in examples])
        divergence = max(0.0, sums["gap"] / max(1.0, sums["count"]))
        return replace(_counted(passes, own), reference=reference, divergence=divergence)

    def share(self, each: ExamplePass, scores: TokenScores, plan: Plan) -> Share:
        logprobs_B = _sums_C(each, scores.logprobs_N)[: len(each.examples)]
        rewards_B = self._kto.beta * (logprobs_B - _known(plan.reference, each, logprobs_B)[:, 0])
        labels = [example.row.label for example in each.examples]
        wanted_B = torch.tensor(labels, dtype=torch.bool, device=rewards_B.device)
        losses_B = kto_losses(rewards_B, wanted_B, plan.divergence, self._kto)
        found_B = rewards_B.detach()
        sums = {
            "labels/reward_desirable": found_B[wanted_B].sum(),
            "labels/reward_undesirable": found_B[~wanted_B].sum(),
            "labels/desirable": wanted_B.float().sum(),
            "labels/kl": found_B.new_full((), plan.divergence * len(each.examples)),
        }
        return Share(loss=losses_B.sum() / max(1, plan.examples), sums=sums)

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        wanted = sums["labels/desirable"]
        return {
            "labels/reward_desirable": sums["labels/reward_desirable"] / max(1.0, wanted),
            "labels/reward_undesirable": sums["labels/reward_undesirable"] / max(1.0, examples - wanted),
            "labels/desirable_fraction": wanted / max(1, examples),
            "labels/kl": sums["labels/kl"] / max(1, examples),
        }


def reference_sums(passes: Passes, made: Sequence[Bundle]) -> dict[int, Tensor]:
    """Sum the reference's logprobs over each answer. All ranks call it together."""
    with passes.as_reference():
        return answer_sums(passes, made, of_reference=True)


def answer_sums(passes: Passes, made: Sequence[Bundle], *, of_reference: bool = False) -> dict[int, Tensor]:
    """Sum logprobs over each answer, without gradient: fp32 (conversations,) by the example's index."""
    found: dict[int, Tensor] = {}
    for each in passes.example_passes(made):
        passes.ranks.pulse.work_on(each.row_ids)
        sums = iter(_sums_C(each, passes.logprobs(each.packed, of_reference=of_reference)))
        for example in each.examples:
            found[example.prompt.index] = torch.stack([next(sums) for _ in example.conversations])
    return found


def _sums_C(each: ExamplePass, values_N: Tensor) -> Tensor:
    owners_N = each.packed.continuation_of_N.to(values_N.device, non_blocking=True)
    return completions.sums(values_N, owners_N, each.packed.continuation_count)


def _by_answer(each: ExamplePass, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values over each answer of a pair, and count their tokens: both (B, 2). A pass without examples has none, and
    is part of the graph."""
    count = 2 * len(each.examples)
    lengths_C = completions.lengths(each.packed.continuation_of_N, each.packed.continuation_count)
    lengths_B2 = lengths_C[:count].view(-1, 2).to(values_N.device, torch.float32, non_blocking=True)
    return _sums_C(each, values_N)[:count].view(-1, 2), lengths_B2


def _known(known: Known, each: ExamplePass, like: Tensor) -> Tensor:
    """Stack what is known of both conversations of a pass's examples: (B, 2)."""
    rows = [known[example.prompt.index] for example in each.examples]
    return torch.stack(rows).to(like.device) if rows else like.new_zeros(0, 2)


def _ranking_sums(values_B2: Tensor) -> dict[str, Tensor]:
    """Sum how much higher the chosen answers are, and in how many pairs; one in which both are equal counts half."""
    margins_B = values_B2[:, 0] - values_B2[:, 1]
    right_B = (margins_B > 0).float() + 0.5 * (margins_B == 0).float()
    return {"pairs/accuracy": right_B.sum(), "pairs/margin": margins_B.sum()}


def _only(example: Example, number: int) -> Example:
    """Return the example with one of its conversations."""
    return Example(conversations=(example.conversations[number],))


def _counted(passes: Passes, made: Sequence[Bundle]) -> Plan:
    examples = [example for bundle in made for example in bundle.examples]
    tokens = [[int(each.is_scored_L.sum()) for each in example.conversations] for example in examples]
    total = passes.ranks.total
    return Plan(
        made=made,
        examples=total(len(examples)),
        tokens=total(sum(map(sum, tokens))),
        first_tokens=total(sum(counts[0] for counts in tokens)),
    )
