"""Measures of rows with answers, without an update: the loss of held-out rows, and sums of the answers' logprobs."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from tiercel.config.schema import DpoRecipe, OfflineRecipe
from tiercel.data.encoding import ExampleEncoder
from tiercel.data.order import file_order
from tiercel.data.rejected_rows import require_few_bad
from tiercel.data.row_table import RowTable
from tiercel.errors import NonFiniteError
from tiercel.message_text import counted
from tiercel.models.families.base import Family
from tiercel.packing.examples import ExampleGroup
from tiercel.rollout.trajectory import given_completion
from tiercel.training.evaluation import ROWS_AT_ONCE, heldout_loader
from tiercel.training.nonfinite_guard import faulty_examples
from tiercel.training.offline.objectives import LossTerms, Objective, ReferenceSums, answer_sums
from tiercel.training.policy_passes import PolicyPasses
from tiercel.training.rank_balancing import grouped_by_rank
from tiercel.training.step_batches import next_batch
from tiercel.types import Example, Group, RejectedRow, RewardValue, ScoredCompletion, ScoredGroup


def heldout_loss(
    passes: PolicyPasses,
    objective: Objective,
    recipe: OfflineRecipe,
    table: RowTable,
    known: ReferenceSums | None = None,
    require_no_stop: Callable[[], object] = lambda: None,
    keep: Callable[[Sequence[ScoredGroup]], object] | None = None,
) -> dict[str, float]:
    """Compute `eval/loss`, and for pairs also `eval/accuracy` and `eval/margin`. What a loss computes over all rows of
    a step is computed over ROWS_AT_ONCE rows. `known` has the reference of the rows by their numbers, if it was
    computed before. Before each ROWS_AT_ONCE rows `require_no_stop` is called, on all ranks; after them, `keep` gets
    this rank's pairs of them, as groups of two answers with their values."""
    objective = objective.judge()
    ranks, sums, examples, loss, weight = passes.ranks, Counter[str](), 0, 0.0, 0
    rejected = list(table.rejected)
    for groups in _groups_of(passes, recipe, table, rejected):
        require_no_stop()
        inputs = objective.prepare(passes, groups, known)
        loss_terms, faulty, pairs = list[LossTerms](), list[str](), list[ScoredGroup]()
        for unit in passes.example_units(inputs.groups) or [passes.empty_examples()]:  # a rank may have no row
            for each, scores in zip(unit.batches, passes.scores(unit), strict=True):
                loss_terms.append(terms := objective.loss_terms(each, scores, inputs))
                faulty += [] if bool(terms.loss.isfinite()) else faulty_examples(each.prompt_ids, terms.losses_B)
                if keep is not None and terms.values_B2 is not None and passes.is_counted:
                    pairs += map(partial(_judged, passes.family), each.examples, terms.values_B2.tolist())
        found = ranks.all_reduce_sums({name: passes.sum_weight * value for name, value in _added(loss_terms).items()})
        if not math.isfinite(found["loss"]):
            raise NonFiniteError(f"eval/loss is {found['loss']}", ranks.all_gather(faulty))
        own = inputs.tokens if recipe.purpose == "sft" else inputs.examples
        loss, weight, examples = loss + found.pop("loss") * own, weight + own, examples + inputs.examples
        sums.update(found)
        if keep is not None:
            keep(sorted(pairs, key=lambda pair: pair.group.prompt.index))
        passes.vision.end_step()
    ranks.run_on_all(lambda: require_few_bad(len(rejected), table.total, recipe.data, rejected))
    means = {
        f"eval/{name}": sums[f"pairs/{name}"] / max(1, examples)
        for name in ("accuracy", "margin")
        if f"pairs/{name}" in sums
    }
    return {"eval/loss": loss / max(1, weight), "eval/count": examples, **means}


def _judged(family: Family, example: Example, values: Sequence[float]) -> ScoredGroup:
    """Make a group of a pair's answers, the chosen one first, which is right if its value is the higher one."""
    answers = [
        ScoredCompletion(
            completion=given_completion(family, each.token_ids_L),
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


def sums_of(passes: PolicyPasses, recipe: OfflineRecipe, table: RowTable) -> dict[int, torch.Tensor]:
    """Sum the policy's logprobs over each answer of every row, by the row's number. All ranks get all sums. Inside
    `as_reference` they are the reference's."""
    found: dict[int, torch.Tensor] = {}
    ld_alpha = recipe.dpo.ld_alpha if isinstance(recipe, DpoRecipe) else None
    for groups in _groups_of(passes, recipe, table, []):
        found |= answer_sums(passes, groups, of_reference=True, ld_alpha=ld_alpha)
        passes.vision.end_step()
    own = {number: sums_2.cpu() for number, sums_2 in found.items()}
    return {number: sums_2 for each in passes.ranks.all_gather(own) for number, sums_2 in each.items()}


def loss_in_words(row: Mapping[str, float], *, is_of_tokens: bool) -> str:
    """Return what `heldout_loss` found as one line for a person. A loss of whole answers has no perplexity."""
    loss, rows = row["eval/loss"], f"on {counted(int(row['eval/count']), 'held-out row')}"
    if "eval/accuracy" in row:
        return f"accuracy {row['eval/accuracy']:.3f}, margin {row['eval/margin']:.4f}, loss {loss:.4f} {rows}"
    if not is_of_tokens:
        return f"loss {loss:.4f} per answer {rows}"
    return f"loss {loss:.4f} a token (perplexity {math.exp(min(loss, 700.0)):.4g}) {rows}"


def _groups_of(
    passes: PolicyPasses, recipe: OfflineRecipe, table: RowTable, rejected: list[RejectedRow]
) -> Iterator[list[ExampleGroup]]:
    """Yield this rank's bundles of the rows, some at a time, and add the rows of all ranks that cannot be encoded to
    `rejected`. The index of each is the number of its row."""
    encode = ExampleEncoder(recipe=recipe, family=passes.family, rows=table.rows, order=file_order(len(table.rows)))
    with heldout_loader(table.rows, encode, recipe, passes.ranks, ROWS_AT_ONCE) as loader:
        for _ in range(loader.steps_left):
            batch = next_batch(loader, passes.ranks)
            rejected += batch.rejected
            yield grouped_by_rank(passes, batch.prompts)


def _added(loss_terms: Sequence[LossTerms]) -> dict[str, float]:
    """Add up what passes give; all have the same sums."""
    rows = [
        {"loss": float(terms.loss)} | {name: float(value) for name, value in terms.sums.items()} for terms in loss_terms
    ]
    return {name: sum(row[name] for row in rows) for name in rows[0]}
