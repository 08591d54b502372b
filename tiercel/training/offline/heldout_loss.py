"""Measures of rows with answers, without an update: the loss of held-out rows, and sums of the answers' logprobs."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from tiercel.config.schema import DpoRecipe, OfflineRecipe
from tiercel.data.encoding import ExampleEncoder
from tiercel.data.order import file_order
from tiercel.data.reading import RowTable, require_few_bad
from tiercel.errors import NonFiniteError
from tiercel.message_text import counted
from tiercel.models.families.base import Family
from tiercel.packing.examples import ExampleGroup
from tiercel.rollout.trajectory import written_text
from tiercel.training.evaluation import ROWS_AT_ONCE, heldout_loader
from tiercel.training.finite import faulty_examples
from tiercel.training.offline.objectives import Known, Objective, PassTerms, answer_sums
from tiercel.training.policy_passes import Passes
from tiercel.training.rank_balancing import grouped_by_rank
from tiercel.training.step_batches import next_batch
from tiercel.types import Completion, Example, Group, RejectedRow, RewardValue, ScoredCompletion, ScoredGroup


def heldout_loss(
    passes: Passes, objective: Objective, recipe: OfflineRecipe, table: RowTable, known: Known | None = None
) -> tuple[dict[str, float], list[ScoredGroup]]:
    """Compute `eval/loss`, and for pairs also `eval/accuracy` and `eval/margin`; also return this rank's pairs, as
    groups of two answers with their values. What a loss computes over all rows of a step is computed over ROWS_AT_ONCE
    rows. `known` has the reference of the rows by their numbers, if it was computed before."""
    objective = objective.judge()
    ranks, sums, examples, loss, weight = passes.ranks, Counter[str](), 0, 0.0, 0
    pairs: list[ScoredGroup] = []
    rejected = list(table.rejected)
    for made in _bundles_of(passes, recipe, table, rejected):
        plan = objective.plan(passes, made, known)
        shares, faulty = list[PassTerms](), list[str]()
        for unit in passes.example_units(plan.made) or [passes.empty_examples()]:  # a rank may have no row
            for each, scores in zip(unit.batches, passes.scores(unit), strict=True):
                shares.append(share := objective.share(each, scores, plan))
                faulty += [] if bool(share.loss.isfinite()) else faulty_examples(each.prompt_ids, share.losses_B)
                if share.values_B2 is not None and passes.is_counted:
                    pairs += map(partial(_judged, passes.family), each.examples, share.values_B2.tolist())
        found = ranks.sum({name: passes.share_of_sums * value for name, value in _added(shares).items()})
        if not math.isfinite(found["loss"]):
            raise NonFiniteError(f"eval/loss is {found['loss']}", ranks.gather(faulty))
        own = plan.tokens if recipe.purpose == "sft" else plan.examples
        loss, weight, examples = loss + found.pop("loss") * own, weight + own, examples + plan.examples
        sums.update(found)
        passes.vision.end_step()
    ranks.together(lambda: require_few_bad(len(rejected), table.total, recipe.data, rejected))
    means = {
        f"eval/{name}": sums[f"pairs/{name}"] / max(1, examples)
        for name in ("accuracy", "margin")
        if f"pairs/{name}" in sums
    }
    pairs.sort(key=lambda pair: pair.group.prompt.index)
    return {"eval/loss": loss / max(1, weight), "eval/count": examples, **means}, pairs


def _judged(family: Family, example: Example, values: Sequence[float]) -> ScoredGroup:
    """Make a group of a pair's answers, the chosen one first, which is right if its value is the higher one."""
    answers = [
        ScoredCompletion(
            completion=Completion(
                token_ids_L=each.token_ids_L,
                logprobs_L=torch.full((len(each.token_ids_L),), math.nan),
                text=written_text(family, each.token_ids_L.tolist()),
                is_truncated=False,
                seed=0,
            ),
            rewards={"value": RewardValue(value=value)},
            total=value,
            is_correct=None if number else value > values[1],
        )
        for number, (each, value) in enumerate(zip(example.conversations, values, strict=True))
    ]
    completions = tuple(each.completion for each in answers)
    return ScoredGroup(
        group=Group(prompt=example.prompt, completions=completions, policy_version=0), completions=tuple(answers)
    )


def sums_of(passes: Passes, recipe: OfflineRecipe, table: RowTable) -> dict[int, torch.Tensor]:
    """Sum the policy's logprobs over each answer of every row, by the row's number. All ranks get all sums. Inside
    `as_reference` they are the reference's."""
    found: dict[int, torch.Tensor] = {}
    ld_alpha = recipe.dpo.ld_alpha if isinstance(recipe, DpoRecipe) else None
    for made in _bundles_of(passes, recipe, table, []):
        found |= answer_sums(passes, made, of_reference=True, ld_alpha=ld_alpha)
        passes.vision.end_step()
    own = {number: sums_2.cpu() for number, sums_2 in found.items()}
    return {number: sums_2 for each in passes.ranks.gather(own) for number, sums_2 in each.items()}


def loss_in_words(row: Mapping[str, float]) -> str:
    """Return what `heldout_loss` found as one line for a person."""
    loss, rows = row["eval/loss"], f"on {counted(int(row['eval/count']), 'held-out row')}"
    if "eval/accuracy" in row:
        return f"accuracy {row['eval/accuracy']:.3f}, margin {row['eval/margin']:.4f}, loss {loss:.4f} {rows}"
    return f"loss {loss:.4f} a token (perplexity {math.exp(min(loss, 700.0)):.4g}) {rows}"


def _bundles_of(
    passes: Passes, recipe: OfflineRecipe, table: RowTable, rejected: list[RejectedRow]
) -> Iterator[list[ExampleGroup]]:
    """Yield this rank's bundles of the rows, some at a time, and add the rows of all ranks that cannot be encoded to
    `rejected`. The index of each is the number of its row."""
    encode = ExampleEncoder(recipe=recipe, family=passes.family, rows=table.rows, order=file_order(len(table.rows)))
    with heldout_loader(table.rows, encode, recipe, passes.ranks, ROWS_AT_ONCE) as loader:
        for _ in range(loader.steps_left):
            batch = next_batch(loader, passes.ranks)
            rejected += batch.rejected
            yield grouped_by_rank(passes, batch.prompts)


def _added(shares: Sequence[PassTerms]) -> dict[str, float]:
    """Add up what passes give; all have the same sums."""
    rows = [
        {"loss": float(share.loss)} | {name: float(value) for name, value in share.sums.items()} for share in shares
    ]
    return {name: sum(row[name] for row in rows) for name in rows[0]}
