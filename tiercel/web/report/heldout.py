"""Held-out rows before and after: how many were fixed and broken, and examples of each kind."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tiercel.message_text import counted
from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.boxes import Outline, has_boxes, predicted_outlines, true_outlines
from tiercel.web.report.cards import box_cell, overlap, value_text
from tiercel.web.report.numbers import evenly_spaced, share, sign_test
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.rollouts import ASKED
from tiercel.web.report.turns import drawn_outlines, is_asked

SIDES = (("gained", "chosen"), ("lost", "rejected"))  # class of the style sheet, which answer
_EVENLY = "Rows of each kind are spread evenly over the file, not picked by hand."
_OF_ROWS = f"The same rows, answered greedily at the first and the last evaluation. {_EVENLY}"
_OF_PAIRS = (
    "The same pairs at the first and the last evaluation. The value of an answer is its implicit reward, or what the "
    "reward model says of it. A pair is right if the chosen answer has the higher one, and wrong if both are "
    f"equal. {_EVENLY}"
)

Change = Literal["fixed", "broken", "right", "wrong", "better", "worse", "same"]


class Column(NamedTuple):
    """A row at one evaluation."""

    name: str  # of the evaluation
    group: GroupRecord
    style: str  # class of the style sheet

    @property
    def answer(self) -> CompletionRecord:
        """Return the greedy answer."""
        return self.group.completions[0]


class Kind(NamedTuple):
    """How rows with the same change are shown."""

    title: str
    in_table: str
    examples: int  # at most


KINDS: dict[Change, Kind] = {
    "fixed": Kind("Fixed: wrong before, right after", "fixed", 6),
    "broken": Kind("Broken: right before, wrong after", "broken", 4),
    "right": Kind("Right before and after", "still right", 2),
    "wrong": Kind("Wrong before and after", "still wrong", 4),
    "better": Kind("Reward rose", "higher", 6),
    "worse": Kind("Reward fell", "lower", 4),
    "same": Kind("Reward stayed the same", "the same", 3),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutBlock:
    """Some rows of one kind, each at every evaluation, out of `count`."""

    title: str
    count: int
    rows: tuple[tuple[Column, ...], ...]
    style: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTab:
    """What the page shows of two evaluations, or of the only one, which has no counts."""

    title: str
    intro: str
    blocks: tuple[HeldOutBlock, ...]
    names: tuple[str, ...] = ()
    counts: tuple[tuple[str, tuple[tuple[Change, int, str], ...]], ...] = ()  # the head of a line; change, count, share
    chance: str = ""
    note: str = ""
    legend: tuple[tuple[str, str], ...] = ()


Pair = tuple[Column, Column]  # a row before and after


def pairs_of(before: GroupFile, after: GroupFile) -> tuple[Pair, ...]:
    """Return the rows that both files have with the same question, in the order of the first file."""
    by_id = {group.id: group for group in after.groups}
    old, new = _names(before, after)
    return tuple(
        (Column(old, group, "before"), Column(new, by_id[group.id], "after"))
        for group in before.groups
        if group.id in by_id and by_id[group.id].question == group.question
    )


def _names(before: GroupFile, after: GroupFile) -> tuple[str, str]:
    return f"before (step {before.step:,})", f"after (step {after.step:,})"


def sorted_by_change(pairs: Sequence[Pair]) -> dict[Change, list[Pair]]:
    """Sort pairs by their change: right or wrong if a reward says so, else by the reward. Once one row was judged, rows
    that no reward judges are left out, as in eval/accuracy."""
    knows = any(column.answer.is_correct is not None for pair in pairs for column in pair)
    kinds: tuple[Change, ...] = ("fixed", "broken", "right", "wrong") if knows else ("better", "worse", "same")
    sorted_in: dict[Change, list[Pair]] = {kind: [] for kind in kinds}
    for pair in pairs:
        if not knows or any(column.answer.is_correct is not None for column in pair):
            sorted_in[_change_of(pair, knows)].append(pair)
    return sorted_in


def _change_of(pair: Pair, knows: bool) -> Change:
    before, after = (column.answer for column in pair)
    if knows:
        was_right, is_right = before.is_correct is True, after.is_correct is True
        if was_right:
            return "right" if is_right else "broken"
        return "fixed" if is_right else "wrong"
    if before.total is None or after.total is None or before.total == after.total:
        return "same"
    return "better" if after.total > before.total else "worse"


def held_out_of(first: GroupFile, last: GroupFile) -> HeldOutTab:
    """Compare two evaluations: counts of all rows, and examples."""
    if first.step == last.step:
        return _single(last)
    pairs = pairs_of(first, last)
    by_change = sorted_by_change(pairs)
    lost, names = len(first.groups) + len(last.groups) - 2 * len(pairs), _names(first, last)
    kinds = ((change, KINDS[change], rows) for change, rows in by_change.items())
    blocks = (_block(kind.title, rows, kind.examples, f"change-block {change}") for change, kind, rows in kinds)
    return HeldOutTab(
        title="Before and after",
        intro=_OF_PAIRS if any(is_pair(after.group) for _, after in pairs) else _OF_ROWS,
        blocks=tuple(filter(None, blocks)),
        names=names,
        counts=tuple(_counts(by_change, names)),
        chance=_chance(len(by_change["fixed"]), len(by_change["broken"])) if "fixed" in by_change else "",
        note=f"{counted(lost, 'row')} could not be paired." if lost else "",
        legend=tuple(_legend(pairs, names)),
    )


def _single(only: GroupFile) -> HeldOutTab:
    """Show the rows of the only evaluation so far, without a comparison."""
    name = f"at step {only.step:,}"
    rows = [(Column(name, group, "after"),) for group in only.groups]
    if any(row[0].answer.is_correct is not None for row in rows):
        right = [row for row in rows if row[0].answer.is_correct is True]
        kinds = {"Right": right, "Wrong": [row for row in rows if row[0].answer.is_correct is False]}
    else:
        kinds = {"Rows": rows}
    return HeldOutTab(
        title="Held-out rows",
        intro=f"There is one evaluation so far, {name}, so nothing to compare it with yet.",
        blocks=tuple(filter(None, (_block(title, chosen, 4) for title, chosen in kinds.items()))),
    )


def _block(title: str, rows: Sequence[tuple[Column, ...]], most: int, style: str = "") -> HeldOutBlock | None:
    shown = tuple(rows[place] for place in evenly_spaced(len(rows), most))
    return HeldOutBlock(title=title, count=len(rows), rows=shown, style=style) if rows else None


def _counts(
    by_change: Mapping[Change, Sequence[Pair]], names: tuple[str, str]
) -> Iterator[tuple[str, tuple[tuple[Change, int, str], ...]]]:
    """Yield the lines of a table of rows by their change: two by two if right and wrong are known."""
    total = max(1, sum(len(pairs) for pairs in by_change.values()))
    lines: dict[str, tuple[Change, ...]] = {f"Reward {names[1]} against {names[0]}": ("better", "same", "worse")}
    if "fixed" in by_change:
        lines = {f"wrong {names[0]}": ("fixed", "wrong"), f"right {names[0]}": ("right", "broken")}
    for head, found in lines.items():
        yield head, tuple((change, len(by_change[change]), share(len(by_change[change]) / total)) for change in found)


def _chance(gained: int, lost: int) -> str:
    if gained + lost == 0:
        return "No row is right in the one and wrong in the other."
    p = sign_test(gained, lost)
    strength = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    meaning = "more than chance would do" if p < 0.05 else "chance alone could do that"
    return f"{gained:,} fixed against {lost:,} broken: {meaning} ({strength}, exact McNemar test)."


def _legend(pairs: Sequence[Pair], names: tuple[str, str]) -> list[tuple[str, str]]:
    boxed = any(has_boxes(after.group) for _, after in pairs)
    asked = any(is_asked(column.group) for pair in pairs for column in pair)
    if not boxed and not asked:
        return []
    keys = [("key before", f"box {names[0]}"), ("key after", f"box {names[1]}")]
    if any(is_pair(after.group) for _, after in pairs):
        keys = [(f"key {style}", f"box of the {side} answer") for style, side in SIDES]
    return [*([("key truth", "right box")] if boxed else []), *keys, *([ASKED] if asked else [])]


def is_pair(group: GroupRecord) -> bool:
    """Tell whether a held-out group is a pair of answers from the row."""
    return len(group.completions) == len(SIDES)


def margin(group: GroupRecord) -> float | None:
    """Return by how much the chosen answer of a pair is worth more."""
    chosen, rejected = (completion.total for completion in group.completions)
    return None if chosen is None or rejected is None else chosen - rejected


def pair_outlines(group: GroupRecord) -> list[Outline]:
    """Return the boxes of both answers."""
    answers = zip(group.completions, SIDES, strict=True)
    return [box for each, (style, side) in answers for box in predicted_outlines(group, each, style, side, side)]


def row_outlines(columns: Sequence[Column]) -> list[Outline]:
    """Return the right box of a row, and those of its answers."""
    group = columns[-1].group
    outlines = true_outlines(group)
    if is_pair(group):
        return outlines + pair_outlines(group)
    for column in columns:
        outlines += drawn_outlines(column.group, column.answer, column.style, column.name)
    return outlines


def facts_of(group: GroupRecord) -> list[tuple[str, str]]:
    """Return what is said of the greedy answer: its reward, its box, each reward of several."""
    completion = group.completions[0]
    facts = [("reward", value_text(completion.total))]
    if has_boxes(group):
        facts += [("IoU", value_text(overlap(group, completion))), ("box", box_cell(group, completion))]
    if len(completion.rewards) > 1:
        facts += [(each, value_text(value)) for each, value in completion.rewards.items() if each != "iou"]
    if completion.is_truncated:
        facts.append(("length", f"truncated at {completion.tokens:,} tokens"))
    return facts
