"""Held-out rows before and after: how many were fixed and broken, and examples of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.boxes import Outline, true_outlines
from tiercel.web.report.numbers import evenly_spaced, share, sign_test
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.rollouts import legend_of
from tiercel.web.report.turns import drawn_outlines

SIDES = (("gained", "chosen"), ("lost", "rejected"))  # class of the style sheet, which answer
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


_BY_VERDICTS: dict[tuple[bool, bool], Change] = {  # was right, is right
    (False, True): "fixed",
    (True, False): "broken",
    (True, True): "right",
    (False, False): "wrong",
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

    names: tuple[str, ...]  # of the evaluations
    blocks: tuple[HeldOutBlock, ...]
    counts: Mapping[Change, tuple[int, str]] = field(default_factory=dict)  # rows, and their share
    chance: str = ""
    unpaired: int = 0  # rows
    has_pairs: bool = False  # of answers
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
    judged = [pair for pair in pairs if any(column.answer.is_correct is not None for column in pair)]
    kinds: Sequence[Change] = tuple(_BY_VERDICTS.values()) if judged else ("better", "worse", "same")
    sorted_in: dict[Change, list[Pair]] = {kind: [] for kind in kinds}
    for pair in judged or pairs:
        before, after = (column.answer for column in pair)
        by_verdict = _BY_VERDICTS[before.is_correct is True, after.is_correct is True]
        sorted_in[by_verdict if judged else _change_of(before.total, after.total)].append(pair)
    return sorted_in


def _change_of(before: float | None, after: float | None) -> Change:
    if before is None or after is None or before == after:
        return "same"
    return "better" if after > before else "worse"


def held_out_of(first: GroupFile, last: GroupFile) -> HeldOutTab:
    """Compare two evaluations: counts of all rows, and examples."""
    if first.step == last.step:
        return _single(last)
    pairs = pairs_of(first, last)
    by_change, names = sorted_by_change(pairs), _names(first, last)
    total = max(1, sum(map(len, by_change.values())))
    has_pairs = any(is_pair(after.group) for _, after in pairs)
    keys = [("key before", f"box {names[0]}"), ("key after", f"box {names[1]}")]
    if has_pairs:
        keys = [(f"key {style}", f"box of the {side} answer") for style, side in SIDES]
    return HeldOutTab(
        names=names,
        blocks=tuple(
            _block(KINDS[change].title, rows, KINDS[change].examples, f"change-block {change}")
            for change, rows in by_change.items()
            if rows
        ),
        counts={change: (len(rows), share(len(rows) / total)) for change, rows in by_change.items()},
        chance=_chance(len(by_change["fixed"]), len(by_change["broken"])) if "fixed" in by_change else "",
        unpaired=len(first.groups) + len(last.groups) - 2 * len(pairs),
        has_pairs=has_pairs,
        legend=tuple(legend_of([column.group for pair in pairs for column in pair], keys)),
    )


def _single(only: GroupFile) -> HeldOutTab:
    """Show the rows of the only evaluation so far, without a comparison."""
    name = f"at step {only.step:,}"
    rows = [(Column(name, group, "after"),) for group in only.groups]
    kinds = {"Right": True, "Wrong": False}
    chosen = {title: [row for row in rows if row[0].answer.is_correct is verdict] for title, verdict in kinds.items()}
    if not any(chosen.values()):
        chosen = {"Rows": rows}
    return HeldOutTab(names=(name,), blocks=tuple(_block(title, found, 4) for title, found in chosen.items() if found))


def _block(title: str, rows: Sequence[tuple[Column, ...]], most: int, style: str = "") -> HeldOutBlock:
    return HeldOutBlock(title=title, count=len(rows), rows=tuple(evenly_spaced(rows, most)), style=style)


def _chance(gained: int, lost: int) -> str:
    if gained + lost == 0:
        return "No row is right in the one and wrong in the other."
    p = sign_test(gained, lost)
    strength = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    meaning = "more than chance would do" if p < 0.05 else "chance alone could do that"
    return f"{gained:,} fixed against {lost:,} broken: {meaning} ({strength}, exact McNemar test)."


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
    return [box for each, (style, side) in answers for box in drawn_outlines(group, each, style, side, side)]


def row_outlines(columns: Sequence[Column]) -> list[Outline]:
    """Return the right box of a row, and those of its answers."""
    group = columns[-1].group
    outlines = true_outlines(group)
    if is_pair(group):
        return outlines + pair_outlines(group)
    for column in columns:
        outlines += drawn_outlines(column.group, column.answer, column.style, column.name)
    return outlines
