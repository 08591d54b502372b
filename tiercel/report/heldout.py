"""Held-out rows before and after: how many were fixed and broken, and examples of each kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tiercel.plurals import counted
from tiercel.report.cards import box_cell, failures_block, overlap, prompt_block, value_text
from tiercel.report.markup import Html, element
from tiercel.report.numbers import evenly_spaced, share, sign_test
from tiercel.report.pairs import INTRO, SIDES, is_pair, pair_outlines, pair_table
from tiercel.report.pictures import Album, Outline, has_boxes, pictures, predicted_box, true_box
from tiercel.report.reading import GroupFile
from tiercel.report.turns import ASKED, asked_outlines, completion_block, is_asked
from tiercel.runs.group_records import GroupRecord

Fate = Literal["fixed", "broken", "right", "wrong", "better", "worse", "same"]

TITLES: dict[Fate, str] = {
    "fixed": "Fixed: wrong before, right after",
    "broken": "Broken: right before, wrong after",
    "right": "Right before and after",
    "wrong": "Wrong before and after",
    "better": "Reward rose",
    "worse": "Reward fell",
    "same": "Reward stayed the same",
}
_IN_TABLE: dict[Fate, str] = {
    "fixed": "fixed",
    "broken": "broken",
    "right": "still right",
    "wrong": "still wrong",
    "better": "higher",
    "worse": "lower",
    "same": "the same",
}
_SHOWN: dict[Fate, int] = {"fixed": 6, "broken": 4, "right": 2, "wrong": 4, "better": 6, "worse": 4, "same": 3}


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
    sorted_in: dict[Fate, list[Pair]] = {
        name: [] for name in (("fixed", "broken", "right", "wrong") if knows else ("better", "worse", "same"))
    }
    for pair in pairs:
        sorted_in[_fate(pair, knows)].append(pair)
    return sorted_in


def _fate(pair: Pair, knows: bool) -> Fate:
    before, after = _greedy(pair.before), _greedy(pair.after)
    if knows:
        verdicts: dict[tuple[bool, bool], Fate] = {
            (False, True): "fixed",
            (True, False): "broken",
            (True, True): "right",
            (False, False): "wrong",
        }
        return verdicts[before.is_correct is True, after.is_correct is True]
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
    shown = [_fate_block(fate, chosen, names, album) for fate, chosen in by_fate.items() if chosen]
    return element(
        "section",
        element("h2", "Before and after"),
        element("p", INTRO if any(is_pair(pair.after) for pair in pairs) else intro, class_="aside"),
        _counts_table(by_fate, names),
        element("p", f"{counted(lost, 'row')} could not be paired.", class_="aside") if lost else None,
        _legend(pairs, names),
        shown,
        id="before-after",
    )


def _counts_table(by_fate: Mapping[Fate, Sequence[Pair]], names: tuple[str, str]) -> Html:
    """Make a table of rows by their change: two by two where right and wrong are known, with a test against chance.
    `names` are the two evaluations."""
    total = max(1, sum(len(pairs) for pairs in by_fate.values()))

    def cell(fate: Fate) -> Html:
        count = len(by_fate[fate])
        percentage = element("small", share(count / total))
        return element("td", element("b", f"{count:,}"), f" {_IN_TABLE[fate]} ", percentage, class_=f"fate {fate}")

    if "fixed" not in by_fate:
        header = element("th", f"Reward {names[1]} against {names[0]}", scope="row")
        row = element("tr", header, cell("better"), cell("same"), cell("worse"))
        return element("div", element("table", row, class_="fates"), class_="scroll")
    heads = [element("th", f"{verdict} {names[1]}", scope="col") for verdict in ("right", "wrong")]
    rows = [
        element("tr", element("th", f"wrong {names[0]}", scope="row"), cell("fixed"), cell("wrong")),
        element("tr", element("th", f"right {names[0]}", scope="row"), cell("right"), cell("broken")),
    ]
    head = element("thead", element("tr", element("td"), heads))
    table = element("table", head, element("tbody", rows), class_="fates")
    sentence = _chance(len(by_fate["fixed"]), len(by_fate["broken"]))
    return element("div", element("div", table, class_="scroll"), element("p", sentence))


def _chance(gained: int, lost: int) -> str:
    if gained + lost == 0:
        return "No row is right in the one and wrong in the other."
    p = sign_test(gained, lost)
    strength = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    meaning = "more than chance would do" if p < 0.05 else "chance alone could do that"
    here, there = _IN_TABLE["fixed"], _IN_TABLE["broken"]
    return f"{gained:,} {here} against {lost:,} {there}: {meaning} ({strength}, exact McNemar test)."


def _legend(pairs: Sequence[Pair], names: tuple[str, str]) -> Html | None:
    boxed = any(has_boxes(pair.after) for pair in pairs)
    asked = any(is_asked(group) for pair in pairs for group in (pair.before, pair.after))
    if not boxed and not asked:
        return None
    keys = [("before", f"box {names[0]}"), ("after", f"box {names[1]}")]
    if any(is_pair(pair.after) for pair in pairs):
        keys = [(style, f"box of the {side} answer") for style, side in SIDES]
    keys = [*([("truth", "right box")] if boxed else []), *keys, *([ASKED] if asked else [])]
    items = [element("li", element("i", class_=f"key {style}"), text) for style, text in keys]
    return element("ul", items, class_="legend")


def _fate_block(fate: Fate, chosen: Sequence[Pair], names: tuple[str, str], album: Album) -> Html:
    indices = evenly_spaced(len(chosen), _SHOWN[fate])
    cards = [_card(chosen[index], names, album) for index in indices]
    title = element("h3", TITLES[fate], " ", element("small", f"{len(cards)} of {counted(len(chosen), 'row')}"))
    return element("div", title, element("div", cards, class_="cards"), class_=f"fate-block {fate}")


def _card(pair: Pair, names: tuple[str, str], album: Album) -> Html:
    columns = [(names[0], pair.before, "before"), (names[1], pair.after, "after")]
    return _article(columns, album)


def _article(columns: Sequence[tuple[str, GroupRecord, str]], album: Album) -> Html:
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


def _outlines(columns: Sequence[tuple[str, GroupRecord, str]]) -> list[Outline]:
    group = columns[-1][1]
    truth = true_box(group)
    outlines = [Outline(box=truth, style="truth", label="right")] if truth is not None else []
    if is_pair(group):
        return [*outlines, *pair_outlines(group)]
    for name, each, style in columns:
        given = predicted_box(each, _greedy(each)).box if has_boxes(group) else None
        if given is not None:
            outlines.append(Outline(box=given, style=style, label=name))
        outlines += asked_outlines(each, _greedy(each), style, name)
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
    return element(
        "div",
        element(
            "h5",
            element("i", class_=f"key {style}") if has_boxes(group) or is_asked(group) else None,
            name,
            " ",
            element("span", verdict, class_=f"verdict {verdict}") if verdict else None,
        ),
        element(
            "dl",
            [element("div", element("dt", key), " ", element("dd", value)) for key, value in facts],
            class_="facts",
        ),
        completion_block(album, group, completion, style),
        failures_block(completion),
        class_="given",
    )


def _single_section(only: GroupFile, album: Album) -> Html:
    """Show the rows of the only evaluation so far, without a comparison."""
    name = f"at step {only.step:,}"
    right = [group for group in only.groups if _greedy(group).is_correct is True]
    wrong = [group for group in only.groups if _greedy(group).is_correct is not True]
    knows = any(_greedy(group).is_correct is not None for group in only.groups)
    kinds = [("Right", right), ("Wrong", wrong)] if knows else [("Rows", list(only.groups))]
    blocks = []
    for title, groups in kinds:
        cards = [_article([(name, groups[place], "after")], album) for place in evenly_spaced(len(groups), 4)]
        if cards:
            heading = element("h3", title, " ", element("small", f"{len(cards)} of {counted(len(groups), 'row')}"))
            blocks.append(element("div", heading, element("div", cards, class_="cards")))
    text = f"There is one evaluation so far, {name}, so nothing to compare it with yet."
    title = element("h2", "Held-out rows")
    return element("section", title, element("p", text, class_="aside"), blocks, id="before-after")
