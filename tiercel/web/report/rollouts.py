"""What was sampled: a choice of steps and prompts, every completion with its box, rewards and advantage."""

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.cards import box_cell, failures_block, number_cell, prompt_block, value_text
from tiercel.web.report.markup import Html, aside, element, legend, section, side_head, table
from tiercel.web.report.numbers import evenly_spaced, share
from tiercel.web.report.pictures import Album, Outline, has_boxes, pictures, true_outlines
from tiercel.web.report.reading import GroupFile
from tiercel.web.report.turns import ASKED, TOLD, completion_block, drawn_outlines, is_asked
from tiercel.wording import counted

MOST_STEPS = 6
_PROMPTS = 3  # of a step
_MOST_COMPLETIONS = 16  # of a prompt
NO_TOKENS: Mapping[int, Html] = MappingProxyType({})
_LEGEND = (
    ("truth", "right box"),
    ("gained", "advantage above 0"),
    ("lost", "advantage below 0"),
    ("neutral", "advantage 0, or none"),
)


def rollouts_section(files: Sequence[GroupFile], step_count: int, album: Album) -> Html:
    """Make the section. `files` are those chosen out of `step_count`."""
    intro = (
        f"{counted(len(files), 'step')} of {step_count:,}. Of each: the prompt whose rewards spread most, and others "
        "spread evenly. Completions by reward, best first."
    )
    groups = [group for file in files for group in file.groups]
    boxed, asked = any(map(has_boxes, groups)), any(map(is_asked, groups))
    told = any(completion.teacher for group in groups for completion in group.completions)
    marks = [element("li", element("mark", "token", class_=f"{style} l2"), text) for style, text in TOLD if told]
    return section(
        "rollouts",
        "Rollouts",
        aside(intro),
        boxes_legend(boxed, asked, marks) if boxed or asked or told else None,
        [_step(file, album, is_open=number in (0, len(files) - 1)) for number, file in enumerate(files)],
    )


def boxes_legend(boxed: bool, asked: bool, marks: Sequence[Html] = ()) -> Html:
    """List the colours of boxes and completions. `marks`: further items."""
    keys = [*(_LEGEND if boxed else _LEGEND[1:]), *([ASKED] if asked else [])]
    return legend([(f"key {style}", text) for style, text in keys], marks)


def chosen_prompts(groups: Sequence[GroupRecord], most: int = _PROMPTS) -> list[GroupRecord]:
    """Choose the prompt whose rewards vary most, then others evenly spaced through the step."""
    if not groups:
        return []
    widest = max(range(len(groups)), key=lambda index: _spread(groups[index]))
    others = [index for index in range(len(groups)) if index != widest]
    return [groups[widest], *(groups[others[place]] for place in evenly_spaced(len(others), most - 1))]


def _totals(group: GroupRecord) -> list[float]:
    return [completion.total for completion in group.completions if completion.total is not None]


def _spread(group: GroupRecord) -> float:
    return statistics.pstdev(totals) if (totals := _totals(group)) else -1.0


def _step(file: GroupFile, album: Album, is_open: bool) -> Html:
    album.begin_part()
    totals = [total for group in file.groups for total in _totals(group)]
    judged = [c.is_correct for group in file.groups for c in group.completions if c.is_correct is not None]
    said = [counted(len(file.groups), "prompt")]
    if totals:
        said.append(f"mean reward {value_text(statistics.fmean(totals))}")
    if judged:
        said.append(f"{share(sum(judged) / len(judged))} right")
    summary = element("summary", element("b", f"Step {file.step:,}"), " ", element("small", ", ".join(said)))
    cards = [group_card(group, album) for group in chosen_prompts(file.groups)]
    return element("details", summary, cards, open=is_open, class_="step")


def group_card(group: GroupRecord, album: Album, tokens: Mapping[int, Html] = NO_TOKENS) -> Html:
    """Show a prompt and its completions, best first. `tokens`: the text of a completion with its tokens marked, by its
    place in the group; it stands for the text, or after the turns where there are several."""
    ranked = sorted(enumerate(group.completions, start=1), key=_rank)
    left_out = len(ranked) - _MOST_COMPLETIONS
    if left_out > 0:
        half = _MOST_COMPLETIONS // 2
        ranked = [*ranked[:half], *ranked[-half:]]
    picture = pictures(album, group, _outlines(group, ranked))
    note = f"The best and the worst {_MOST_COMPLETIONS // 2} of {len(group.completions)} completions."
    return element(
        "article",
        picture,
        element("div", prompt_block(group), class_="words"),
        element("p", note, class_="aside wide") if left_out > 0 else None,
        _table(group, ranked, album, tokens),
        class_="card rollout" if picture is not None else "card rollout text-only",
    )


def _rank(numbered: tuple[int, CompletionRecord]) -> tuple[bool, float, int]:
    number, completion = numbered
    return completion.total is None, -(completion.total or 0.0), number


def _style(completion: CompletionRecord) -> str:
    if not completion.advantage:
        return "neutral"
    return "gained" if completion.advantage > 0 else "lost"


def _outlines(group: GroupRecord, numbered: Sequence[tuple[int, CompletionRecord]]) -> list[Outline]:
    outlines: list[Outline] = []
    for number, completion in reversed(numbered):  # the best lie on top
        outlines += drawn_outlines(group, completion, _style(completion), f"completion {number}", str(number))
    return outlines + true_outlines(group)


def _table(
    group: GroupRecord, numbered: Sequence[tuple[int, CompletionRecord]], album: Album, tokens: Mapping[int, Html]
) -> Html:
    names = list(dict.fromkeys(name for completion in group.completions for name in completion.rewards))
    shows_box = has_boxes(group)
    shows_total = len(names) != 1 or any(c.total != c.rewards.get(names[0]) for c in group.completions)
    heads = ["", *names, *(["total"] if shows_total else []), "advantage", "tokens", *(["box"] if shows_box else [])]
    rows = []
    for number, completion in numbered:
        values = [value_text(completion.rewards.get(name)) for name in names]
        if shows_total:
            values.append("masked" if completion.total is None else value_text(completion.total))
        values.append(value_text(completion.advantage))
        values.append(f"{completion.tokens:,}" + (", truncated" if completion.is_truncated else ""))
        if shows_box:
            values.append(box_cell(group, completion))
        cells = [number_cell(head, value) for head, value in zip(heads[1:], values, strict=True)]
        marked = tokens.get(number - 1)
        is_whole = marked is not None and not completion.turns
        said = None if is_whole else completion_block(album, group, completion, _style(completion))
        text = element("td", said, marked, failures_block(completion), class_="text")
        mark = side_head(element("i", class_=f"key {_style(completion)}"), str(number))
        box = str(number) if shows_box or completion.turns else None
        rows.append(element("tr", mark, cells, text, data_box=box))
    return table(rows, [*heads, "completion"], "completions", " wide")
