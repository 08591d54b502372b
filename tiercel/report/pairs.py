"""Held-out pairs of a chosen and a rejected answer: what each is worth before and after."""

from collections.abc import Sequence

from tiercel.report.cards import text_block, value_text
from tiercel.report.markup import Html, element
from tiercel.report.pictures import Outline, has_boxes, predicted_box
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
    found = [
        (predicted_box(group, completion).box if has_boxes(group) else None, style, side)
        for completion, (style, side) in zip(group.completions, SIDES, strict=True)
    ]
    return [Outline(box=box, style=style, label=side, tag=side) for box, style, side in found if box is not None]


def pair_table(columns: Sequence[tuple[str, GroupRecord]]) -> Html:
    """Show both answers with their values in each evaluation, and the margin."""
    head = element("tr", [element("th", text, scope="col") for text in ("", *(name for name, _ in columns), "answer")])
    rows = []
    for number, (style, side) in enumerate(SIDES):
        values = [(name, value_text(group.completions[number].total)) for name, group in columns]
        cells = [element("td", value, class_="number", data_label=name) for name, value in values]
        mark = element("th", element("i", class_=f"key {style}"), side, scope="row")
        text = element("td", text_block(columns[-1][1].completions[number].text), class_="text")
        rows.append(element("tr", mark, cells, text))
    margins = [(name, value_text(_margin(group))) for name, group in columns]
    cells = [element("td", value, class_="number", data_label=name) for name, value in margins]
    rows.append(element("tr", element("th", "margin", scope="row"), cells, element("td")))
    table = element("table", element("thead", head), element("tbody", rows), class_="completions")
    return element("div", table, class_="scroll")


def _margin(group: GroupRecord) -> float | None:
    chosen, rejected = (completion.total for completion in group.completions)
    return None if chosen is None or rejected is None else chosen - rejected
