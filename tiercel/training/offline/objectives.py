"""What each verb learns from the answers in its rows: what it computes before an update, and the loss of a pass.

A step's examples are bundled and divided among the ranks. An objective makes UpdateInputs of them, which hold what it
needs to know about the whole step. Then each pass gives its terms of the loss.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import Self

from tiercel.algorithms import completions
from tiercel.algorithms.preference import PAIR_LOSSES, PairInput, kto_losses, matched, ranking_losses, wpo_weights
from tiercel.algorithms.preference_sections import MATCHED, Dpo, Kto, Ranking
from tiercel.algorithms.sft import TOKEN_LOSSES, Sft
from tiercel.config.schema import DpoRecipe, KtoRecipe, OfflineRecipe, RewardRecipe, SftRecipe
from tiercel.data.formats.preferences import wanted_margin
from tiercel.devices import moved
from tiercel.packing.examples import ExampleBatch, ExampleGroup, example_groups
from tiercel.packing.logprobs import TokenScores
from tiercel.packing.pass_options import NOTHING, EmbeddingNoise, PassOptions
from tiercel.training.policy_passes import PolicyPasses
from tiercel.types import Example

ReferenceSums = Mapping[int, Tensor]  # by the example's index: fp32, a number for each of its conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateInputs:
    """What an update learns from, and what is known before it."""

    groups: Sequence[ExampleGroup]  # of this rank
    examples: int  # of all ranks
    tokens: int  # scored ones of all ranks
    first_tokens: int  # scored ones of the examples' first conversations, of all ranks
    reference: ReferenceSums = field(default_factory=dict)  # logprobs of the answers, summed over their tokens
    matched: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # AOT's, by the pair's index
    divergence: float = 0.0  # KTO's: of the policy from the reference, nats per answer


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerms:
    """What a pass adds to the loss, and to the sums that metrics are computed from."""

    loss: Tensor  # with its graph
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # over examples
    values_B2: Tensor | None = None  # fp32, detached: the value of each answer of a pair; None without pairs
    losses_B: Tensor | None = None  # fp32, detached, of each example; None if the loss is over tokens


class Objective(Protocol):
    """What learns from the answers in rows."""

    state: dict[str, float]  # what later steps need from earlier ones; checkpoints keep it

    def prepare(
        self, passes: PolicyPasses, groups: Sequence[ExampleGroup], reference: ReferenceSums | None = None
    ) -> UpdateInputs:
        """Compute what is needed before an update. All ranks call it together. Pass `reference` if it was computed
        before."""

    def pass_options(self, each: ExampleBatch) -> PassOptions:
        """Return what an update asks of the learner's pass besides logprobs."""

    def loss_terms(self, each: ExampleBatch, scores: TokenScores, inputs: UpdateInputs) -> LossTerms:
        """Compute what a pass adds."""

    def judge(self) -> "Objective":
        """Return the objective that judges held-out rows."""

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        """Compute keys of metrics.jsonl from the sums over all ranks, and remember what `state` keeps."""


def objective_of(recipe: OfflineRecipe) -> Objective:
    """Make the objective of a recipe."""
    if isinstance(recipe, DpoRecipe):
        return Pairs(recipe.dpo)
    if isinstance(recipe, RewardRecipe):
        return Values(recipe.ranking)
    if isinstance(recipe, KtoRecipe):
        return Labels(recipe.kto)
    assert isinstance(recipe, SftRecipe)
    return Tokens(recipe.sft, recipe.train.seed)


class _Plain:
    """An objective that needs nothing before an update; its metrics are means over examples."""

    def __init__(self) -> None:
        self.state: dict[str, float] = {}

    def prepare(
        self, passes: PolicyPasses, groups: Sequence[ExampleGroup], reference: ReferenceSums | None = None
    ) -> UpdateInputs:
        return _counted(passes, groups)

    def pass_options(self, each: ExampleBatch) -> PassOptions:
        return NOTHING

    def judge(self) -> Self:
        return self

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        return {name: value / max(1, examples) for name, value in sums.items()}


class Tokens(_Plain):
    """SFT: the mean loss over the scored tokens."""

    def __init__(self, sft: Sft, seed: int):
        super().__init__()
        self._sft = sft
        self._seed = seed

    def pass_options(self, each: ExampleBatch) -> PassOptions:
        if self._sft.is_plain:
            return NOTHING
        alpha, noise = self._sft.neftune_alpha, None
        if alpha is not None:
            seeds = (f"{self._seed} {example.prompt.index}".encode() for example in each.examples)
            # The index is the row's place in the order of the whole run, so its noise differs in every epoch.
            noise = EmbeddingNoise(
                alpha=alpha, seeds=tuple(int.from_bytes(sha256(seed).digest()[:7], "big") for seed in seeds)
            )
        return PassOptions(smoothing=self._sft.label_smoothing, noise=noise)

    def loss_terms(self, each: ExampleBatch, scores: TokenScores, inputs: UpdateInputs) -> LossTerms:
        return LossTerms(loss=TOKEN_LOSSES[self._sft.loss].compute(scores.logprobs_N).sum() / max(1, inputs.tokens))

    def judge(self) -> "Tokens":
        # -p log p is 0 if the answers have no probability, so it says nothing about a model.
        return Tokens(Sft(), self._seed)


class Pairs(_Plain):
    """A loss of pairs, plus the mean negative logprob of the chosen answers if the recipe wants it."""

    def __init__(self, dpo: Dpo):
        self._dpo = dpo
        self.state = {"rewards": 0.0, "answers": 0.0}  # sum and number of the implicit rewards so far

    def prepare(
        self, passes: PolicyPasses, groups: Sequence[ExampleGroup], reference: ReferenceSums | None = None
    ) -> UpdateInputs:
        inputs = _counted(passes, groups)
        if not self._dpo.has_reference:
            return inputs
        reference = reference_sums(passes, groups, self._dpo.ld_alpha) if reference is None else reference
        return replace(inputs, reference=reference, matched=self._matched(passes, groups, reference))

    def pass_options(self, each: ExampleBatch) -> PassOptions:
        return PassOptions(squares=True) if self._dpo.wpo else NOTHING

    def _matched(
        self, passes: PolicyPasses, groups: Sequence[ExampleGroup], reference: ReferenceSums
    ) -> dict[int, tuple[float, float]]:
        """Match the margins of policy and reference, or the log ratios of chosen and rejected answers, over the step's
        pairs on all ranks; empty if the loss uses neither."""
        if self._dpo.loss not in MATCHED:
            return {}
        policy = answer_sums(passes, groups, ld_alpha=self._dpo.ld_alpha)
        if self._dpo.loss == "aot":
            own = {index: (_margin(policy[index]), _margin(reference[index])) for index in policy}
        else:
            ratios = {index: (sums_2 - reference[index].to(sums_2.device)).tolist() for index, sums_2 in policy.items()}
            own = {index: (chosen, rejected) for index, (chosen, rejected) in ratios.items()}
        every = {index: margins for each in passes.ranks.all_gather(own) for index, margins in each.items()}
        return matched(every)

    def loss_terms(self, each: ExampleBatch, scores: TokenScores, inputs: UpdateInputs) -> LossTerms:
        dpo = self._dpo
        logprobs_B2, lengths_B2 = _by_answer(each, scores.logprobs_N)
        compared_B2 = logprobs_B2
        if dpo.ld_alpha is not None:
            compared_B2, _ = _by_answer(each, _tail_weights(each, dpo.ld_alpha, scores.logprobs_N) * scores.logprobs_N)
        matches = [inputs.matched[example.prompt.index] for example in each.examples] if inputs.matched else []
        pairs = PairInput(
            logprobs_B2=compared_B2,
            reference_B2=_known(inputs.reference, each, logprobs_B2) if dpo.has_reference else None,
            lengths_B2=lengths_B2,
            matched_B2=logprobs_B2.new_tensor(matches).view(-1, 2),
            shift=self.state["rewards"] / max(1.0, self.state["answers"]),
        )
        rewards_B2 = pairs.rewards_B2(dpo).detach()
        losses_B = _of_finite(PAIR_LOSSES[dpo.loss].compute(pairs, dpo), rewards_B2)
        if scores.squares_N is not None:
            aligned_N = scores.logprobs_N.detach() - scores.squares_N
            losses_B = losses_B * wpo_weights(_by_answer(each, aligned_N)[0] / lengths_B2)
        loss = losses_B.sum() / max(1, inputs.examples)
        if dpo.sft_weight:
            loss = loss - dpo.sft_weight * logprobs_B2[:, 0].sum() / max(1, inputs.first_tokens)
        means_B2 = (logprobs_B2 / lengths_B2).detach()
        sums = {
            "pairs/reward_chosen": rewards_B2[:, 0].sum(),
            "pairs/reward_rejected": rewards_B2[:, 1].sum(),
            "pairs/logprob_chosen": means_B2[:, 0].sum(),
            "pairs/logprob_rejected": means_B2[:, 1].sum(),
        }
        sums = _ranking_sums(rewards_B2) | sums
        return LossTerms(loss=loss, sums=sums, values_B2=rewards_B2, losses_B=losses_B.detach())

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        self.state["rewards"] += sums["pairs/reward_chosen"] + sums["pairs/reward_rejected"]
        self.state["answers"] += 2 * examples
        return super().metrics(sums, examples)


class Values(_Plain):
    """The loss of a reward model, whose value of an answer is the one at the state that predicts the answer's last
    token."""

    def __init__(self, ranking: Ranking):
        super().__init__()
        self._ranking = ranking

    def loss_terms(self, each: ExampleBatch, scores: TokenScores, inputs: UpdateInputs) -> LossTerms:
        assert scores.values_N is not None
        values_B2 = completions.lasts(scores.values_N, each.packed.continuation_of_N).view(-1, 2)
        margins = [wanted_margin(example.row, self._ranking) for example in each.examples]
        found_B2 = values_B2.detach()
        losses_B = ranking_losses(values_B2, values_B2.new_tensor(margins), self._ranking.centre_coef)
        losses_B = _of_finite(losses_B, found_B2)
        sums = {"pairs/reward_chosen": found_B2[:, 0].sum(), "pairs/reward_rejected": found_B2[:, 1].sum()}
        loss = losses_B.sum() / max(1, inputs.examples)
        sums = _ranking_sums(found_B2) | sums
        return LossTerms(loss=loss, sums=sums, values_B2=found_B2, losses_B=losses_B.detach())


class Labels(_Plain):
    """KTO. The second conversation of each example has another row's answer; the policy's divergence from the reference
    is estimated on these."""

    def __init__(self, kto: Kto):
        super().__init__()
        self._kto = kto

    def prepare(
        self, passes: PolicyPasses, groups: Sequence[ExampleGroup], reference: ReferenceSums | None = None
    ) -> UpdateInputs:
        examples = [example for group in groups for example in group.examples]
        own = example_groups([_only(example, 0) for example in examples], passes.sharing_family)
        if self._kto.loss == "apo_zero_unpaired":
            return replace(
                _counted(passes, own), reference=reference_sums(passes, own) if reference is None else reference
            )
        reference = reference_sums(passes, groups) if reference is None else reference
        policy = answer_sums(passes, example_groups([_only(example, 1) for example in examples], passes.sharing_family))
        gaps = {index: float(policy[index][0] - reference[index][1]) for index in policy}
        known = [gap for gap in gaps.values() if math.isfinite(gap)]
        # A row whose gap is not finite has no loss; it must not spoil the loss of all other rows.
        spoilt = {index: reference[index] * math.nan for index, gap in gaps.items() if not math.isfinite(gap)}
        reference = {**reference, **spoilt}
        sums = passes.ranks.all_reduce_sums({"gap": sum(known), "count": float(len(known))})
        divergence = max(0.0, sums["gap"] / max(1.0, sums["count"]))
        return replace(_counted(passes, own), reference=reference, divergence=divergence)

    def loss_terms(self, each: ExampleBatch, scores: TokenScores, inputs: UpdateInputs) -> LossTerms:
        logprobs_B = _sums_C(each, scores.logprobs_N)[: len(each.examples)]
        reference_BC = _known(inputs.reference, each, logprobs_B)
        rewards_B = self._kto.beta * (logprobs_B - reference_BC[:, 0])
        labels = [example.row.label for example in each.examples]
        wanted_B = torch.tensor(labels, dtype=torch.bool, device=rewards_B.device)
        found_B = rewards_B.detach()
        losses_B = kto_losses(rewards_B, wanted_B, inputs.divergence, self._kto)
        losses_B = _of_finite(losses_B, torch.column_stack([found_B, reference_BC]))
        sums = {
            "labels/reward_desirable": found_B[wanted_B].sum(),
            "labels/reward_undesirable": found_B[~wanted_B].sum(),
            "labels/desirable": wanted_B.float().sum(),
            "labels/kl": found_B.new_full((), inputs.divergence * len(each.examples)),
        }
        return LossTerms(loss=losses_B.sum() / max(1, inputs.examples), sums=sums, losses_B=losses_B.detach())

    def metrics(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        wanted = sums["labels/desirable"]
        counts = {"labels/reward_desirable": wanted, "labels/reward_undesirable": examples - wanted}
        return {
            **{name: sums[name] / count for name, count in counts.items() if count > 0},
            "labels/desirable_fraction": wanted / max(1, examples),
            "labels/kl": sums["labels/kl"] / max(1, examples),
        }


def reference_sums(
    passes: PolicyPasses, groups: Sequence[ExampleGroup], ld_alpha: float | None = None
) -> dict[int, Tensor]:
    """Sum the reference's logprobs over each answer, as `answer_sums` does. All ranks call it together."""
    with passes.as_reference():
        return answer_sums(passes, groups, of_reference=True, ld_alpha=ld_alpha)


def answer_sums(
    passes: PolicyPasses, groups: Sequence[ExampleGroup], *, of_reference: bool = False, ld_alpha: float | None = None
) -> dict[int, Tensor]:
    """Sum logprobs over each answer, without gradient: fp32 (conversations,) by the example's index. `ld_alpha` is the
    weight of tokens beyond the length of the pair's shorter answer."""
    found: dict[int, Tensor] = {}
    for unit in passes.example_units(groups):
        for each, scores in zip(unit.batches, passes.scores(unit, of_reference=of_reference), strict=True):
            logprobs_N = scores.logprobs_N
            if ld_alpha is not None:
                logprobs_N = _tail_weights(each, ld_alpha, logprobs_N) * logprobs_N
            sums = iter(_sums_C(each, logprobs_N))
            for example in each.examples:
                found[example.prompt.index] = torch.stack([next(sums) for _ in example.conversations])
    return found


def _sums_C(each: ExampleBatch, values_N: Tensor) -> Tensor:
    owners_N = moved(each.packed.continuation_of_N, values_N.device)
    return completions.sums(values_N, owners_N, each.packed.continuation_count)


def _by_answer(each: ExampleBatch, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Sum values over each answer of a pair, and count their tokens: both (B, 2). A pass without examples has none, but
    is part of the graph."""
    count = 2 * len(each.examples)
    lengths_C = completions.lengths(each.packed.continuation_of_N, each.packed.continuation_count)
    lengths_B2 = lengths_C[:count].view(-1, 2).to(values_N.device, torch.float32, non_blocking=True)
    return _sums_C(each, values_N)[:count].view(-1, 2), lengths_B2


def _tail_weights(each: ExampleBatch, weight: float, like_N: Tensor) -> Tensor:
    """Weight each token of a pair's answers by 1, and by `weight` beyond the length of the pair's shorter answer:
    (N,)."""
    owners_N, count = each.packed.continuation_of_N, 2 * len(each.examples)
    lengths_C = completions.lengths(owners_N, each.packed.continuation_count)
    shared_C = lengths_C.clone()
    shared_C[:count] = lengths_C[:count].view(-1, 2).amin(1).repeat_interleave(2)
    places_N = torch.arange(len(owners_N)) - (lengths_C.cumsum(0) - lengths_C)[owners_N]
    weights_N = torch.where(places_N < shared_C[owners_N], 1.0, weight)
    return weights_N.to(like_N.device, like_N.dtype, non_blocking=True)


def _of_finite(losses_B: Tensor, values_BV: Tensor) -> Tensor:
    """Make the loss of an example NaN if one of its values is not finite: s(inf) is 1, which looks like a loss."""
    return losses_B + 0 * values_BV.sum(1)


def _margin(sums_2: Tensor) -> float:
    return float(sums_2[0] - sums_2[1])


def _known(known: ReferenceSums, each: ExampleBatch, like: Tensor) -> Tensor:
    """Stack what is known of both conversations of a pass's examples: (B, 2)."""
    rows = [known[example.prompt.index] for example in each.examples]
    return torch.stack(rows).to(like.device) if rows else like.new_zeros(0, 2)


def _ranking_sums(values_B2: Tensor) -> dict[str, Tensor]:
    """Sum how much higher the chosen answers are, and in how many pairs they are; a pair of equal values counts
    half."""
    margins_B = values_B2[:, 0] - values_B2[:, 1]
    right_B = (margins_B > 0).float() + 0.5 * (margins_B == 0).float()
    return {"pairs/accuracy": right_B.sum(), "pairs/margin": margins_B.sum()}


def _only(example: Example, number: int) -> Example:
    """Return the example with only one of its conversations."""
    return Example(conversations=(example.conversations[number],))


def _counted(passes: PolicyPasses, groups: Sequence[ExampleGroup]) -> UpdateInputs:
    examples = [example for group in groups for example in group.examples]
    tokens = [[int(each.is_scored_L.sum()) for each in example.conversations] for example in examples]
    total = passes.ranks.all_reduce_sum
    return UpdateInputs(
        groups=groups,
        examples=total(len(examples)),
        tokens=total(sum(map(sum, tokens))),
        first_tokens=total(sum(counts[0] for counts in tokens)),
    )
