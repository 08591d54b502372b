"""What the policy's pass saw at each token of a step's first prompts, for tokens/. N scored tokens of a microbatch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.distributed.ranks import Ranks
from tiercel.models.families.base import Family
from tiercel.packing.batch import CompletionName
from tiercel.reliability.redaction import without_secrets
from tiercel.runs.records import GroupTokens, TokenRecord, Values, finite
from tiercel.training.distillation.teacher_term import token_texts
from tiercel.training.optimizer_step import TokensSeen
from tiercel.types import Completion, ScoredGroup

MOST_TOKENS = 1024  # of a completion
Seen = dict[CompletionName, tuple[Tensor, Tensor]]  # logprobs and entropies of a completion's drawn tokens


def token_records(
    ranks: Ranks, family: Family, everyone: Sequence[ScoredGroup], seen: Sequence[TokensSeen], most: int
) -> list[GroupTokens]:
    """Make the records of the first `most` prompts of a step. All ranks call it; only the first has `everyone`, and
    only it gets records. `seen` is of this rank; if two passes saw a completion, the first counts."""
    if most == 0:
        return []
    first = everyone[:most]
    chosen = ranks.run_on_first(lambda: frozenset(group.group.prompt.index for group in first))
    found: Seen = {}
    for of_rank in ranks.gather_on_first(_of_completions(seen, chosen)):
        found = of_rank | found
    return [_group_tokens(family, group, found) for group in first]


def _of_completions(seen: Sequence[TokensSeen], chosen: frozenset[int]) -> Seen:
    """Cut what a rank's passes saw into the chosen prompts' completions."""
    found: Seen = {}
    for part in seen:
        wanted = [place for place, name in enumerate(part.names_C) if name.index in chosen]
        if not wanted:
            continue
        values_2N = torch.stack([part.logprobs_N, part.entropy_N]).cpu()
        for place in wanted:
            logprobs_L, entropies_L = values_2N[:, part.completion_of_N == place]
            found.setdefault(part.names_C[place], (logprobs_L, entropies_L))
    return found


def _group_tokens(family: Family, group: ScoredGroup, found: Seen) -> GroupTokens:
    prompt = group.group.prompt
    names = [
        CompletionName(row=prompt.row.id, index=prompt.index, number=number) for number in range(len(group.completions))
    ]
    return GroupTokens(
        index=prompt.index,
        completions=tuple(
            _token_record(family, each.completion, found.get(name))
            for name, each in zip(names, group.completions, strict=True)
        ),
    )


def _token_record(family: Family, completion: Completion, values: tuple[Tensor, Tensor] | None) -> TokenRecord:
    drawn, own = (
        completion.token_ids_L[completion.is_sampled_L][:MOST_TOKENS],
        completion.sampled_logprobs[:MOST_TOKENS],
    )
    values = None if values is None else (values[0][:MOST_TOKENS], values[1][:MOST_TOKENS])
    return TokenRecord(
        texts=tuple(without_secrets(token_texts(family, drawn.tolist()))),
        logprobs=_rounded(own),
        entropies=None if values is None else _rounded(values[1]),
        gaps=None if values is None else _rounded(values[0] - own),
    )


def _rounded(values_L: Tensor) -> Values:
    """Keep what a page shows; further digits would be half of the file."""
    return tuple(finite(round(value, 3)) for value in values_L.tolist())
