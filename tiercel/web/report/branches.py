"""The completions of a group as rows of its table. A group that forks is a tree: what several completions begin with
stands once, and what follows it is indented beneath."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tiercel.message_text import counted
from tiercel.runs.records import CompletionRecord, TokenRecord
from tiercel.web.report.cards import value_text


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedCompletion:
    """A completion in the table of its group, counted from 1."""

    number: int
    completion: CompletionRecord
    style: str  # class of the style sheet
    values: tuple[str, ...]  # under the heads of the card
    record: TokenRecord | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    """A row: a completion from its last fork on, or the part before, which several completions share."""

    depth: int  # how many shared parts stand above
    said: str  # of a shared part; empty for a completion
    ranked: RankedCompletion  # with the text and the tokens of this part, and all turns
    turns: range  # of this part, counted from 0
    is_empty: bool = False  # the completion ended with the shared part above


def rows_of(ranked: Sequence[RankedCompletion]) -> tuple[ShownPart, ...]:
    """Return the rows of a table, in the order given, or in the order of the tree if completions fork."""
    if any(each.completion.forks for each in ranked):
        ranked = sorted(ranked, key=lambda each: each.number)
    return tuple(_rows(ranked, 0, 0, 0))


def _rows(ranked: Sequence[RankedCompletion], depth: int, place: int, letter: int) -> Iterator[ShownPart]:
    """Yield the rows of completions that share their first `place` tokens and `letter` characters."""
    bundles: dict[tuple[int, ...], list[RankedCompletion]] = {}
    for each in ranked:
        ids, forks = each.completion.token_ids, each.completion.forks
        bundles.setdefault(ids[: forks[depth]] if depth < len(forks) else (each.number,), []).append(each)
    for bundle in bundles.values():
        first = bundle[0]
        if len(bundle) == 1:
            yield _part(first, depth, (place, None), (letter, None), "")
            continue
        fork = first.completion.forks[depth]
        shared = _common_length([each.completion.text for each in bundle])
        yield _part(first, depth, (place, fork), (letter, shared), _said(bundle))
        yield from _rows(bundle, depth + 1, fork, shared)


def _common_length(texts: Sequence[str]) -> int:
    least, most = min(texts), max(texts)
    return next((n for n, (one, other) in enumerate(zip(least, most, strict=False)) if one != other), len(least))


def _said(bundle: Sequence[RankedCompletion]) -> str:
    totals = [each.completion.total for each in bundle if each.completion.total is not None]
    mean = f", mean reward {value_text(statistics.fmean(totals))}" if totals else ""
    return f"{counted(len(bundle), 'completion')} from here{mean}"


def _part(
    ranked: RankedCompletion, depth: int, places: tuple[int, int | None], letters: tuple[int, int | None], said: str
) -> ShownPart:
    """Cut a part out of a completion, between two places among its tokens and among the characters of its text; None is
    the end."""
    made, record, (start, stop) = ranked.completion, ranked.record, places
    drawn = slice(_sampled_before(made, start), None if stop is None else _sampled_before(made, stop))
    if record is not None:
        record = TokenRecord(
            texts=record.texts[drawn],
            logprobs=record.logprobs[drawn],
            entropies=None if record.entropies is None else record.entropies[drawn],
            gaps=None if record.gaps is None else record.gaps[drawn],
        )
    first, last = (sum(place is None or turn.start < place for turn in made.turns) for place in places)
    text = made.text[letters[0] : letters[1]]
    cut = replace(made, text=text, teacher=made.teacher[drawn], failures={} if said else made.failures)
    return ShownPart(
        depth=depth,
        said=said,
        ranked=replace(ranked, completion=cut, record=record),
        turns=range(first, last),
        is_empty=depth > 0 and not said and start >= len(made.token_ids),
    )


def _sampled_before(made: CompletionRecord, place: int) -> int:
    """Count the tokens before a place that the policy sampled."""
    if not made.turns:
        return place
    return sum(min(turn.stop, place) - min(turn.start, place) for turn in made.turns)
