"""Pairs of answers and what a teacher says of tokens, on the page."""

import re
from dataclasses import replace

import pytest

from tests.web.report.fake_runs import completion, group, make_empty, write_lines
from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.heldout import pair_outlines, pairs_of, sorted_by_change
from tiercel.web.report.page_sections import held_out_part
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, read_groups, read_run
from tiercel.web.report.templates import environment


def pair(number: int, chosen: float, rejected: float, image: dict | None = None) -> dict:
    """A held-out pair and the values of its answers."""
    answers = [
        {**completion(text, {"value": value}, correct), "total": value}
        for text, value, correct in (("[1, 2, 3, 4]", chosen, chosen > rejected), ("[5, 6, 7, 8]", rejected, None))
    ]
    return group(f"row-{number}", "Where?", [1, 2, 3, 5], [] if image is None else [image], answers)


def files(tmp_path, *steps: list[dict]) -> list[GroupFile]:
    path = make_empty(tmp_path / "run")
    for step, lines in enumerate(steps):
        write_lines(path / "evaluations" / f"step-{step:06d}.jsonl", lines)
    run = read_run(path)
    return [read_groups(run, "evaluations", step) for step in run.evaluation_steps]


def test_a_pair_is_right_where_the_chosen_answer_is_worth_more(tmp_path):
    before = [pair(0, 0.0, 0.0), pair(1, 0.5, 0.25)]
    first, last = files(tmp_path, before, [pair(0, 0.75, -0.5), pair(1, -0.125, 0.25)])
    by_change = sorted_by_change(pairs_of(first, last))
    assert [(change, len(pairs)) for change, pairs in by_change.items() if pairs] == [("fixed", 1), ("broken", 1)]
    page = held_out_part([first, last], Album(tmp_path))
    assert "implicit reward" in page and "1 fixed against 1 broken" in page
    for value in ("1.25", "0.375", "[1, 2, 3, 4]", "[5, 6, 7, 8]", "chosen", "rejected"):  # margins after, and answers
        assert value in page
    assert "answered greedily" not in page
    assert "rejected" in held_out_part([last], Album(tmp_path))


def test_both_boxes_of_a_pair_are_drawn(tmp_path):
    image = {"sha256": "ab" * 32, "path": None, "original_size": [100, 200], "processed_size": [50, 100]}
    record = GroupRecord.from_json(pair(0, 1.0, 0.0, image))
    outlines = pair_outlines(record)
    assert [(outline.label, outline.style) for outline in outlines] == [("chosen", "gained"), ("rejected", "lost")]
    assert outlines[0].box == pytest.approx((2, 4, 6, 8)) and outlines[1].box == pytest.approx((10, 12, 14, 16))


def told(*tokens: tuple[str, float | None]) -> CompletionRecord:
    made = GroupRecord.from_json(group("a", "?", "7", [], [completion("x", {"exact": 1.0}, True)]))
    return replace(made.completions[0], teacher=tokens)


def block(tmp_path, made: CompletionRecord) -> str:
    record = GroupRecord.from_json(group("a", "?", "7", [], [completion("x", {}, None)]))
    cards = environment().get_template("cards.html").module
    return str(cards.completion(Album(tmp_path), record, made, "gained"))


def test_tokens_are_coloured_by_the_teachers_view(tmp_path):
    page = block(tmp_path, told(("It", 0.05), (" is", 0.3), (" <b>", -0.7), (" 7", 4.0), (".", None)))
    found = re.findall(r'policy over teacher (.{5})" data-teacher="(.+?)">(.+?)</mark>', page)
    assert found == [("+0.30", "up1", " is"), ("-0.70", "down2", " &lt;b&gt;"), ("+4.00", "up3", " 7")]
    text = re.sub("<.+?>", "", page).strip()
    assert text == "It is &lt;b&gt; 7." and '<pre class="said marked"><mark' in page


def test_a_long_completion_is_coloured_at_its_beginning(tmp_path):
    assert "[… 200 tokens left out here …]" in block(tmp_path, told(*[("a", 0.0)] * 1000))
