"""What was sampled: a choice of steps and prompts, every completion with its box, rewards and advantage."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.message_text import counted
from tiercel.runs.records import CompletionRecord, GroupRecord, GroupTokens
from tiercel.web.report.boxes import Outline, has_boxes, true_outlines
from tiercel.web.report.branches import RankedCompletion, ShownPart, rows_of
from tiercel.web.report.cards import box_cell, judged_of, totals_of, value_text
from tiercel.web.report.numbers import evenly_spaced, share
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.tokens import choices_of, records_of
from tiercel.web.report.turns import drawn_outlines, is_asked

MOST_STEPS = 6
_PROMPTS = 3  # of a step
_MOST_COMPLETIONS = 16  # of a prompt
_LEGEND = (
    ("key truth", "right box"),
    ("key gained", "advantage above 0"),
    ("key lost", "advantage below 0"),
    ("key neutral", "advantage 0, or none"),
)
ASKED = ("key asked", "thin: asked of a tool")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCard:
    """A prompt and its completions, best first, or as a tree if they fork."""

    group: GroupRecord
    heads: tuple[str, ...]
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


def legend_of(groups: Sequence[GroupRecord]) -> list[tuple[str, str]]:
    """Return classes and meanings of the colours of boxes and completions; none if nothing is drawn."""
    boxed, asked = any(map(has_boxes, groups)), any(map(is_asked, groups))
    return [*_LEGEND[not boxed :], *([ASKED] if asked else [])] if boxed or asked else []


def chosen_prompts(groups: Sequence[GroupRecord], most: int = _PROMPTS) -> list[GroupRecord]:
    """Choose the prompt whose rewards vary most, then others evenly spaced through the step."""
    if not groups:
        return []
    widest = max(range(len(groups)), key=lambda index: _spread(groups[index]))
    others = [index for index in range(len(groups)) if index != widest]
    return [groups[widest], *(groups[others[place]] for place in evenly_spaced(len(others), most - 1))]


def _spread(group: GroupRecord) -> float:
    return statistics.pstdev(totals) if (totals := totals_of(group)) else -1.0


def group_card(group: GroupRecord, tokens: GroupTokens | None = None) -> GroupCard:
    """Rank the completions of a prompt; of many the best and the worst. `tokens`: those that the run kept of it."""
    names = tuple(dict.fromkeys(name for completion in group.completions for name in completion.rewards))
    shows_total = len(names) != 1 or any(c.total != c.rewards.get(names[0]) for c in group.completions)
    records = records_of(group, tokens)
    ranked = sorted(
        (
            RankedCompletion(
                number=number,
                completion=completion,
                style=_style(completion),
                values=_values(group, completion, names, shows_total),
                record=records[number - 1],
            )
            for number, completion in enumerate(group.completions, start=1)
        ),
        key=_rank,
    )
    note, half = "", _MOST_COMPLETIONS // 2
    if len(ranked) > _MOST_COMPLETIONS:
        note = f"The best and the worst {half} of {len(ranked)} completions."
        ranked = [*ranked[:half], *ranked[-half:]]
    heads = (*names, *(["total"] if shows_total else []), "advantage", "tokens", *(["box"] if has_boxes(group) else []))
    return GroupCard(
        group=group,
        heads=heads,
        rows=rows_of(ranked),
        outlines=tuple(_outlines(group, ranked)),
        note=note,
        choices=tuple(choices_of(group, tokens)),
    )


def _rank(ranked: RankedCompletion) -> tuple[bool, float, int]:
    total = ranked.completion.total
    return total is None, -(total or 0.0), ranked.number


def _style(completion: CompletionRecord) -> str:
    if not completion.advantage:
        return "neutral"
    return "gained" if completion.advantage > 0 else "lost"


def _outlines(group: GroupRecord, ranked: Sequence[RankedCompletion]) -> list[Outline]:
    outlines: list[Outline] = []
    for each in reversed(ranked):  # the best lie on top
        number = str(each.number)
        outlines += drawn_outlines(group, each.completion, each.style, f"completion {number}", number)
    return outlines + true_outlines(group)


def _values(
    group: GroupRecord, completion: CompletionRecord, names: Sequence[str], shows_total: bool
) -> tuple[str, ...]:
    values = [value_text(completion.rewards.get(name)) for name in names]
    if shows_total:
        values.append("masked" if completion.total is None else value_text(completion.total))
    values.append(value_text(completion.advantage))
    values.append(f"{completion.tokens:,}" + (", truncated" if completion.is_truncated else ""))
    return (*values, box_cell(group, completion)) if has_boxes(group) else tuple(values)
