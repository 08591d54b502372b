"""What was sampled: a choice of steps and prompts, every completion with its box, rewards and advantage."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tiercel.message_text import counted
from tiercel.runs.records import CompletionRecord, GroupRecord, GroupTokens, TokenRecord
from tiercel.web.report.boxes import Outline, has_boxes, true_outlines
from tiercel.web.report.cards import judged_of, totals_of, value_text
from tiercel.web.report.numbers import evenly_spaced, share
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.tokens import choices_of, records_of
from tiercel.web.report.turns import drawn_outlines, is_asked


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownPart:
    """A row: a completion from its last fork on, or the part before, which several completions share."""

    number: int  # of the completion, counted from 1
    completion: CompletionRecord  # with the text and the tokens of this part, and all turns
    record: TokenRecord | None
    turns: range  # of this part, counted from 0
    depth: int = 0  # how many shared parts stand above
    said: str = ""  # of a shared part; empty for a completion
    is_empty: bool = False  # the completion ended with the shared part above

    @property
    def style(self) -> str:
        """Return the class of the style sheet."""
        if not self.completion.advantage:
            return "neutral"
        return "gained" if self.completion.advantage > 0 else "lost"


def rows_of(ranked: Sequence[ShownPart]) -> tuple[ShownPart, ...]:
    """Return the rows of a table of completions, in the order given, or in the order of the tree if they fork."""
    if any(each.completion.forks for each in ranked):
        return tuple(_rows(sorted(ranked, key=lambda each: each.number), 0, 0, 0))
    return tuple(ranked)


def _rows(ranked: Sequence[ShownPart], depth: int, place: int, letter: int) -> Iterator[ShownPart]:
    """Yield the rows of completions that share their first `place` tokens and `letter` characters."""
    bundles: dict[tuple[int, ...], list[ShownPart]] = {}
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


def _said(bundle: Sequence[ShownPart]) -> str:
    totals = [each.completion.total for each in bundle if each.completion.total is not None]
    mean = f", mean reward {value_text(statistics.fmean(totals))}" if totals else ""
    return f"{counted(len(bundle), 'completion')} from here{mean}"


def _part(
    whole: ShownPart, depth: int, places: tuple[int, int | None], letters: tuple[int, int | None], said: str
) -> ShownPart:
    """Cut a part out of a completion, between two places among its tokens and among the characters of its text; None is
    the end."""
    made, record, (start, stop) = whole.completion, whole.record, places
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
    return replace(
        whole,
        completion=cut,
        record=record,
        turns=range(first, last),
        depth=depth,
        said=said,
        is_empty=depth > 0 and not said and start >= len(made.token_ids),
    )


def _sampled_before(made: CompletionRecord, place: int) -> int:
    """Count the tokens before a place that the policy sampled."""
    if not made.turns:
        return place
    return sum(min(turn.stop, place) - min(turn.start, place) for turn in made.turns)


MOST_STEPS = 6
_PROMPTS = 3  # of a step
_MOST_COMPLETIONS = 16  # of a prompt
_ADVANTAGES = (
    ("key gained", "advantage above 0"),
    ("key lost", "advantage below 0"),
    ("key neutral", "advantage 0, or none"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCard:
    """A prompt and its completions, best first, or as a tree if they fork."""

    group: GroupRecord
    rewards: tuple[str, ...]  # their names
    shows_total: bool  # which is not that of the only reward
    rows: tuple[ShownPart, ...]
    outlines: tuple[Outline, ...]
    note: str  # of what is left out
    choices: tuple[str, ...]  # by which its tokens can be coloured


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownStep:
    """Some groups of a step, and all of them in words."""

    step: int
    said: str
    cards: tuple[GroupCard, ...]


def shown_step(file: GroupFile, album: Album) -> ShownStep:
    """Choose groups of a step, of those whose pictures the run has kept if it has any."""
    kept = [group for group in file.groups if all(album.has(image.sha256) for image in group.images)]
    totals = [total for group in file.groups for total in totals_of(group)]
    judged = [verdict for group in file.groups for verdict in judged_of(group)]
    said = [counted(len(file.groups), "prompt")]
    if totals:
        said.append(f"mean reward {value_text(statistics.fmean(totals))}")
    if judged:
        said.append(f"{share(sum(judged) / len(judged))} right")
    chosen = chosen_prompts(kept or file.groups)
    return ShownStep(step=file.step, said=", ".join(said), cards=tuple(map(group_card, chosen)))


def legend_of(groups: Sequence[GroupRecord], keys: Sequence[tuple[str, str]] = _ADVANTAGES) -> list[tuple[str, str]]:
    """Return classes and meanings of the colours of boxes and completions; none if nothing is drawn. `keys`: those of
    the completions."""
    boxed, asked = any(map(has_boxes, groups)), any(map(is_asked, groups))
    truth = [("key truth", "right box")] if boxed else []
    thin = [("key asked", "thin: asked of a tool")] if asked else []
    return [*truth, *keys, *thin] if boxed or asked else []


def chosen_prompts(groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    """Choose the prompt whose rewards vary most, then others evenly spaced through the step."""
    if not groups:
        return []
    widest = max(groups, key=_spread)
    return [widest, *evenly_spaced([group for group in groups if group is not widest], _PROMPTS - 1)]


def _spread(group: GroupRecord) -> float:
    return statistics.pstdev(totals) if (totals := totals_of(group)) else -1.0


def group_card(group: GroupRecord, tokens: GroupTokens | None = None) -> GroupCard:
    """Rank the completions of a prompt; of many the best and the worst. `tokens`: those that the run kept of it."""
    names = tuple(dict.fromkeys(name for completion in group.completions for name in completion.rewards))
    recorded = enumerate(zip(group.completions, records_of(group, tokens), strict=True), start=1)
    parts = (
        ShownPart(number=number, completion=each, record=record, turns=range(len(each.turns)))
        for number, (each, record) in recorded
    )
    ranked = sorted(parts, key=_rank)
    note, half = "", _MOST_COMPLETIONS // 2
    if len(ranked) > _MOST_COMPLETIONS:
        note = f"The best and the worst {half} of {len(ranked)} completions."
        ranked = [*ranked[:half], *ranked[-half:]]
    return GroupCard(
        group=group,
        rewards=names,
        shows_total=len(names) != 1 or any(each.total != each.rewards.get(names[0]) for each in group.completions),
        rows=rows_of(ranked),
        outlines=tuple(_outlines(group, ranked)),
        note=note,
        choices=tuple(choices_of(group, tokens)),
    )


def _rank(whole: ShownPart) -> tuple[bool, float, int]:
    total = whole.completion.total
    return total is None, -(total or 0.0), whole.number


def _outlines(group: GroupRecord, ranked: Sequence[ShownPart]) -> list[Outline]:
    outlines: list[Outline] = []
    for each in reversed(ranked):  # the best lie on top
        number = str(each.number)
        outlines += drawn_outlines(group, each.completion, each.style, f"completion {number}", number)
    return outlines + true_outlines(group)
