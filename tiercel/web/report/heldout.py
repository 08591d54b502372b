"""Held-out rows before and after: how many were fixed and broken, and examples of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tiercel.runs.records import GroupRecord
from tiercel.web.report.cards import (
    box_cell,
    failures_block,
    number_cell,
    overlap,
    prompt_block,
    text_block,
    value_text,
)
from tiercel.web.report.markup import Html, aside, element, legend, section, side_head, table
from tiercel.web.report.numbers import evenly_spaced, share, sign_test
from tiercel.web.report.pictures import Album, Outline, has_boxes, pictures, predicted_outlines, true_outlines
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.turns import ASKED, completion_block, drawn_outlines, is_asked
from tiercel.wording import counted

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


Fate = Literal["fixed", "broken", "right", "wrong", "better", "worse", "same"]
Columns = Sequence[tuple[str, GroupRecord, str]]  # an evaluation's name, the row there, a class of the style sheet


class Kind(NamedTuple):
    """How rows of one fate are shown."""

    title: str
    in_table: str
    examples: int  # at most


KINDS: dict[Fate, Kind] = {
    "fixed": Kind("Fixed: wrong before, right after", "fixed", 6),
    "broken": Kind("Broken: right before, wrong after", "broken", 4),
    "right": Kind("Right before and after", "still right", 2),
    "wrong": Kind("Wrong before and after", "still wrong", 4),
    "better": Kind("Reward rose", "higher", 6),
    "worse": Kind("Reward fell", "lower", 4),
    "same": Kind("Reward stayed the same", "the same", 3),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A held-out row under two policies."""

    before: GroupRecord
    after: GroupRecord


def pairs_of(before: GroupFile, after: GroupFile) -> tuple[Pair, ...]:
    """Return the rows that both files have with the same question, in the order of the first file."""
    by_id = {group.id: group for group in after.groups}
    return tuple(
        Pair(before=group, after=by_id[group.id])
        for group in before.groups
        if group.id in by_id and by_id[group.id].question == group.question
    )


def fates(pairs: Sequence[Pair]) -> dict[Fate, list[Pair]]:
    """Sort pairs by their change: right or wrong where a reward says so, else by the reward.

    Where other rows were judged, a row that was not judged counts as wrong, as in eval/accuracy.
    """
    knows = any(c.is_correct is not None for pair in pairs for c in (_greedy(pair.before), _greedy(pair.after)))
    kinds: tuple[Fate, ...] = ("fixed", "broken", "right", "wrong") if knows else ("better", "worse", "same")
    sorted_in: dict[Fate, list[Pair]] = {kind: [] for kind in kinds}
    for pair in pairs:
        sorted_in[_fate(pair, knows)].append(pair)
    return sorted_in


def _fate(pair: Pair, knows: bool) -> Fate:
    before, after = _greedy(pair.before), _greedy(pair.after)
    if knows:
        was_right, is_right = before.is_correct is True, after.is_correct is True
        if was_right:
            return "right" if is_right else "broken"
        return "fixed" if is_right else "wrong"
    if before.total is None or after.total is None or before.total == after.total:
        return "same"
    return "better" if after.total > before.total else "worse"


def _greedy(group: GroupRecord):
    return group.completions[0]


def held_out_section(first: GroupFile, last: GroupFile, album: Album) -> Html:
    """Make the section: counts of all rows, then cards of examples."""
    album.begin_part()
    if first.step == last.step:
        return _single_section(last, album)
    pairs = pairs_of(first, last)
    by_fate = fates(pairs)
    lost = len(first.groups) + len(last.groups) - 2 * len(pairs)
    names = (f"before (step {first.step:,})", f"after (step {last.step:,})")
    intro = (
        "The same rows, answered greedily at the first and the last evaluation. Rows of each kind are spread evenly "
        "over the file, not picked by hand."
    )
    shown = []
    for fate, chosen in by_fate.items():
        rows = [[(names[0], pair.before, "before"), (names[1], pair.after, "after")] for pair in chosen]
        shown.append(_block(KINDS[fate].title, rows, KINDS[fate].examples, album, f"fate-block {fate}"))
    return section(
        "before-after",
        "Before and after",
        aside(INTRO if any(is_pair(pair.after) for pair in pairs) else intro),
        _counts_table(by_fate, names),
        aside(f"{counted(lost, 'row')} could not be paired." if lost else None),
        _legend(pairs, names),
        shown,
    )


def _counts_table(by_fate: Mapping[Fate, Sequence[Pair]], names: tuple[str, str]) -> Html:
    """Make a table of rows by their change: two by two where right and wrong are known, with a test against chance.
    `names` are the two evaluations."""
    total = max(1, sum(len(pairs) for pairs in by_fate.values()))

    def cell(fate: Fate) -> Html:
        count = len(by_fate[fate])
        percentage = element("small", share(count / total))
        return element("td", element("b", f"{count:,}"), f" {KINDS[fate].in_table} ", percentage, class_=f"fate {fate}")

    if "fixed" not in by_fate:
        reward = side_head(f"Reward {names[1]} against {names[0]}")
        return table([(reward, cell("better"), cell("same"), cell("worse"))], style="fates")
    rows = [
        (side_head(f"wrong {names[0]}"), cell("fixed"), cell("wrong")),
        (side_head(f"right {names[0]}"), cell("right"), cell("broken")),
    ]
    counts = table(rows, (element("td"), f"right {names[1]}", f"wrong {names[1]}"), "fates")
    return element("div", counts, element("p", _chance(len(by_fate["fixed"]), len(by_fate["broken"]))))


def _chance(gained: int, lost: int) -> str:
    if gained + lost == 0:
        return "No row is right in the one and wrong in the other."
    p = sign_test(gained, lost)
    strength = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    meaning = "more than chance would do" if p < 0.05 else "chance alone could do that"
    return f"{gained:,} fixed against {lost:,} broken: {meaning} ({strength}, exact McNemar test)."


def _legend(pairs: Sequence[Pair], names: tuple[str, str]) -> Html | None:
    boxed = any(has_boxes(pair.after) for pair in pairs)
    asked = any(is_asked(group) for pair in pairs for group in (pair.before, pair.after))
    if not boxed and not asked:
        return None
    keys = [("before", f"box {names[0]}"), ("after", f"box {names[1]}")]
    if any(is_pair(pair.after) for pair in pairs):
        keys = [(style, f"box of the {side} answer") for style, side in SIDES]
    keys = [*([("truth", "right box")] if boxed else []), *keys, *([ASKED] if asked else [])]
    return legend((f"key {style}", text) for style, text in keys)


def _block(title: str, rows: Sequence[Columns], most: int, album: Album, style: str | None = None) -> Html | None:
    """Show some rows under a heading; None without rows."""
    cards = [_article(rows[place], album) for place in evenly_spaced(len(rows), most)]
    heading = element("h3", title, " ", element("small", f"{len(cards)} of {counted(len(rows), 'row')}"))
    return element("div", heading, element("div", cards, class_="cards"), class_=style) if cards else None


def _article(columns: Columns, album: Album) -> Html:
    """Show a row and what was answered in each evaluation."""
    group = columns[-1][1]
    if is_pair(group):
        answers = pair_table([(name, each) for name, each, _ in columns])
    else:
        answers = element("div", [_answer(*column, album) for column in columns], class_="answers")
    picture = pictures(album, group, _outlines(columns))
    return element(
        "article",
        picture,
        element("div", prompt_block(group), answers, class_="words"),
        class_="card" if picture is not None else "card text-only",
    )


def _outlines(columns: Columns) -> list[Outline]:
    group = columns[-1][1]
    outlines = true_outlines(group)
    if is_pair(group):
        return outlines + pair_outlines(group)
    for name, each, style in columns:
        outlines += drawn_outlines(each, _greedy(each), style, name)
    return outlines


def _answer(name: str, group: GroupRecord, style: str, album: Album) -> Html:
    completion = _greedy(group)
    verdict = {True: "right", False: "wrong", None: ""}[completion.is_correct]
    facts = [("reward", value_text(completion.total))]
    if has_boxes(group):
        facts += [("IoU", value_text(overlap(group, completion))), ("box", box_cell(group, completion))]
    if len(completion.rewards) > 1:
        facts += [(each, value_text(value)) for each, value in completion.rewards.items() if each != "iou"]
    if completion.is_truncated:
        facts.append(("length", f"truncated at {completion.tokens:,} tokens"))
    key = element("i", class_=f"key {style}") if has_boxes(group) or is_asked(group) else None
    listed = [element("div", element("dt", fact), " ", element("dd", text)) for fact, text in facts]
    told = element("span", verdict, class_=f"verdict {verdict}") if verdict else None
    return element(
        "div",
        element("h5", key, name, " ", told),
        element("dl", listed, class_="facts"),
        completion_block(album, group, completion, style),
        failures_block(completion),
        class_="given",
    )


def _single_section(only: GroupFile, album: Album) -> Html:
    """Show the rows of the only evaluation so far, without a comparison."""
    name = f"at step {only.step:,}"
    knows = any(_greedy(group).is_correct is not None for group in only.groups)
    rows: dict[str, list[Columns]] = {"Right": [], "Wrong": []} if knows else {"Rows": []}
    for group in only.groups:
        title = ("Right" if _greedy(group).is_correct is True else "Wrong") if knows else "Rows"
        rows[title].append([(name, group, "after")])
    text = f"There is one evaluation so far, {name}, so nothing to compare it with yet."
    blocks = [_block(title, chosen, 4, album) for title, chosen in rows.items()]
    return section("before-after", "Held-out rows", aside(text), blocks)
