"""Held-out pairs of a chosen and a rejected answer: what each is worth before and after."""

from collections.abc import Sequence

from tiercel.report.cards import number_cell, text_block, value_text
from tiercel.report.markup import Html, element, side_head, table
from tiercel.report.pictures import Outline, predicted_outlines
from tiercel.runs.group_records import GroupRecord

SIDES = (("gained", "chosen"), ("lost", "rejected"))  # class of the style sheet, which answer
INTRO = (
    "The same pairs at the first and the last evaluation. The value of an answer is its implicit reward, or what the "
    "reward model says of it. A pair is right where the chosen answer has the higher one, and wrong where both are "
    "equal. Rows of each kind are spread evenly over the file, not picked by hand."
)


def is_pair(group: GroupRecord) -> bool:
    """Tell whether a held-out group is a pair of answers from the row."""
    return len(group.completions) == len(SIDES)


def pair_outlines(group: GroupRecord) -> list[Outline]:
    """Return the boxes of both answers."""
    answers = zip(group.completions, SIDES, strict=True)
    return [box for each, (style, side) in answers for box in predicted_outlines(group, each, style, side, side)]


def pair_table(columns: Sequence[tuple[str, GroupRecord]]) -> Html:
    """Show both answers with their values in each evaluation, and the margin."""
    rows = []
    for number, (style, side) in enumerate(SIDES):
        values = [group.completions[number].total for _, group in columns]
        mark = side_head(element("i", class_=f"key {style}"), side)
        text = element("td", text_block(columns[-1][1].completions[number].text), class_="text")
        rows.append([mark, *_cells(columns, values), text])
    margins = _cells(columns, [_margin(group) for _, group in columns])
    rows.append([side_head("margin"), *margins, element("td")])
    return table(rows, ("", *(name for name, _ in columns), "answer"), "completions")


def _cells(columns: Sequence[tuple[str, GroupRecord]], values: Sequence[float | None]) -> list[Html]:
    return [number_cell(name, value_text(value)) for (name, _), value in zip(columns, values, strict=True)]


def _margin(group: GroupRecord) -> float | None:
    chosen, rejected = (completion.total for completion in group.completions)
    return None if chosen is None or rejected is None else chosen - rejected
