"""Columns of groups: from the index, from files without one, and after a run was cut."""

import math
import os
import random
import time

import pytest

from tests.web.report.fake_runs import completion, group, new_run, write_lines
from tiercel.runs.index import append_entry, file_entry
from tiercel.runs.json_lines import cut_lines
from tiercel.runs.records import groups_path
from tiercel.web.view.filters import GroupFilter, StepFiles, find, positions
from tiercel.web.view.groups import Groups


def write_step(run, step: int, totals: dict[str, list[float | None]], *, indexed: bool = True, text: str = "") -> None:
    """Write a step whose groups have these totals. A completion is right if its total is 1."""
    lines = []
    for id, values in totals.items():
        made = [
            completion(f"{text or 'an answer'} of {id}", {"exact": value}, None if value is None else value == 1)
            for value in values
        ]
        for each, value in zip(made, values, strict=True):
            each["total"] = value
        lines.append(group(id, "Which?", "x", [], made))
    write_lines(groups_path(run, "rollouts", step), lines)
    if indexed:
        append_entry(run, file_entry(run, "rollouts", step))


@pytest.fixture
def run(tmp_path):
    made = new_run(tmp_path / "run", "# tiercel grpo\ntrain: {steps: 9}\n")
    write_step(made, 1, {"a": [0.0, 0.0, 1.0], "b": [0.5, 0.5]})
    write_step(made, 2, {"a": [1.0, 1.0, 0.0], "c": [None, None]})
    write_step(made, 3, {"d": [0.25, 0.0, None], "e": [1.0, 0.0]}, text='He said "Straße"\nand É')
    return made


def known(run) -> Groups:
    groups = Groups(run)
    groups.refresh()
    return groups


def names(columns, chosen=None) -> list[str]:
    ids = {code: id for id, code in columns.codes.items()}
    return [f"{columns.steps[at]}{ids[columns.ids[at]]}" for at in (range(len(columns)) if chosen is None else chosen)]


def test_columns_hold_the_numbers_of_each_group(run):
    columns = known(run).columns("rollouts")
    assert names(columns) == ["1a", "1b", "2a", "2c", "3d", "3e"]
    assert columns.best.tolist()[:3] == [1.0, 0.5, 1.0] and math.isnan(columns.best[3])
    assert columns.right.tolist() == [1, 0, 2, 0, 0, 1] and columns.masked.tolist() == [0, 0, 0, 2, 1, 0]
    assert columns.rewards["exact"][4] == 0.125


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (GroupFilter(), ["3d", "3e", "2a", "2c", "1a", "1b"]),
        (GroupFilter(order="oldest"), ["1a", "1b", "2a", "2c", "3d", "3e"]),
        (GroupFilter(order="worst"), ["3d", "1a", "3e", "1b", "2a", "2c"]),  # equal ones newest first, masked last
        (GroupFilter(order="best"), ["2a", "3e", "1b", "1a", "3d", "2c"]),
        (GroupFilter(order="spread"), ["3e", "2a", "1a", "3d", "1b", "2c"]),
        (GroupFilter(order="lucky"), ["1a", "3e"]),  # one of three before one of two
        (GroupFilter(order="equal"), ["1b"]),
        (GroupFilter(order="masked"), ["3d", "2c"]),
        (GroupFilter(row="a"), ["2a", "1a"]),
        (GroupFilter(row="nobody"), []),
        (GroupFilter(steps=(2, 3)), ["3d", "3e", "2a", "2c"]),
        (GroupFilter(low=0.5), ["3e", "2a", "1b"]),
        (GroupFilter(measure="best", high=0.5), ["3d", "1b"]),
        (GroupFilter(measure="exact", low=0.6, high=0.7), ["2a"]),
        (GroupFilter(measure="unknown", low=0.0), []),
        (GroupFilter(order="lucky", row="e", low=0.5, high=0.5), ["3e"]),
    ],
)
def test_filters_and_orders(run, wanted, expected):
    columns = known(run).columns("rollouts")
    assert names(columns, positions(columns, wanted)) == expected


def test_groups_come_part_by_part(run):
    columns = known(run).columns("rollouts")
    seen, after = [], None
    while True:
        found = find(run, columns, GroupFilter(order="best"), after=after, most=4, seconds=1)
        seen += names(columns, found.positions)
        after = found.cursor
        if found.is_over:
            break
    assert seen == ["2a", "3e", "1b", "1a", "3d", "2c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("said", ["3d", "3e"]),
        ("SAID", ["3d", "3e"]),
        ('said "Straße"\nand', ["3d", "3e"]),  # as people write it, not as JSON does
        ("of a", ["2a", "1a"]),
        ("and É", ["3d", "3e"]),
        ("total", []),  # a key of the file, in no text
        ("[1, 2, 3]", []),  # ids of tokens
    ],
)
def test_texts_are_searched_as_people_write_them(run, text, expected):
    columns = known(run).columns("rollouts")
    found = find(run, columns, GroupFilter(text=text), after=None, most=9, seconds=9)
    assert names(columns, found.positions) == expected and found.is_over


def test_a_search_goes_on_where_its_time_ended(run):
    columns = known(run).columns("rollouts")
    wanted, after, parts = GroupFilter(text="of e"), None, []
    while True:
        found = find(run, columns, wanted, after=after, most=9, seconds=-1)  # time for one group each
        parts.append((found.looked_at, names(columns, found.positions)))
        after = found.cursor
        if found.is_over:
            break
    assert parts == [(1, []), (2, ["3e"]), (3, []), (4, []), (5, []), (6, [])]


def test_a_group_is_read_from_its_bytes(run):
    columns = known(run).columns("rollouts")
    with StepFiles(run, "rollouts", columns) as files:
        group = files.group(5)
        assert group is not None and group.id == "e" and [each.total for each in group.completions] == [1.0, 0.0]
        groups_path(run, "rollouts", 1).unlink()
        assert files.group(0) is None
        groups_path(run, "rollouts", 2).write_text("another file by now\n" * 99)
        assert files.group(2) is None


def test_new_lines_and_a_step_that_is_written_again(run):
    groups = known(run)
    assert len(groups.columns("rollouts")) == 6
    write_step(run, 4, {"f": [1.0]})
    groups.refresh()
    assert names(groups.columns("rollouts"))[6:] == ["4f"]
    write_step(run, 4, {"g": [1.0], "h": [0.0]})
    groups.refresh()
    assert names(groups.columns("rollouts"))[6:] == ["4g", "4h"]


def test_a_run_that_was_cut_and_went_on(run):
    groups = known(run)
    for step in (2, 3):
        groups_path(run, "rollouts", step).unlink()
    groups.refresh()  # files are gone, but their lines are not yet: no group is shown that cannot be read
    cut_lines(run / "index.jsonl", 1)
    groups.refresh()
    assert len(groups.columns("rollouts")) == 2
    write_step(run, 2, {"z": [0.5]})
    groups.refresh()
    assert names(groups.columns("rollouts")) == ["1a", "1b", "2z"]


def test_files_without_an_index_are_read_in_the_background(run):
    complete = known(run).columns("rollouts")
    (run / "index.jsonl").unlink()
    groups = known(run)
    assert len(groups.columns("rollouts")) == 0 and groups.unread == [("rollouts", step) for step in (3, 2, 1)]
    groups.read_unread(0.0)
    groups.read_unread(9.0)
    assert groups.unread == []
    columns = groups.columns("rollouts")
    assert names(columns) == names(complete)
    assert columns.starts.tolist() == complete.starts.tolist()


def test_a_run_without_an_index_that_was_cut_and_went_on(run):
    (run / "index.jsonl").unlink()
    groups = known(run)
    groups.read_unread(9.0)
    for step in (2, 3):
        groups_path(run, "rollouts", step).unlink()
    groups.refresh()
    write_step(run, 2, {"z": [0.5]}, indexed=False)
    groups.refresh()
    groups.read_unread(9.0)
    assert names(groups.columns("rollouts")) == ["1a", "1b", "2z"]


def test_a_file_that_has_just_been_written_waits_for_its_line(run):
    write_step(run, 4, {"f": [1.0]}, indexed=False)
    assert known(run).unread == []
    old = time.time() - 60
    os.utime(groups_path(run, "rollouts", 4), (old, old))
    assert known(run).unread == [("rollouts", 4)]


def test_lines_of_the_index_that_make_no_sense_are_left_out(run):
    with (run / "index.jsonl").open("a") as file:
        file.write('[]\nnonsense\n{"folder": "rollouts", "step": 7}\n{"folder": "else", "step": 7}\n{"step": 1\n')
    assert len(known(run).columns("rollouts")) == 6


@pytest.mark.parametrize("seed", range(10))
def test_entries_in_any_order_of_which_the_last_of_a_step_counts(tmp_path, seed):
    dice = random.Random(seed)
    run = new_run(tmp_path / "run", "# tiercel grpo\n")
    groups, expected = Groups(run), {}
    for _ in range(3):
        for _ in range(dice.randint(0, 6)):
            step = dice.randint(1, 5)
            totals = {dice.choice("abcd"): [dice.random()] for _ in range(dice.randint(0, 3))}
            groups_path(run, "rollouts", step).unlink(missing_ok=True)
            write_step(run, step, totals)
            expected[step] = list(totals)
        groups.refresh()
        columns = groups.columns("rollouts")
        assert names(columns) == [f"{step}{id}" for step in sorted(expected) for id in expected[step]]
        assert len(columns.mean) == len(columns.rewards.get("exact", columns.mean)) == len(columns)


def test_columns_that_were_given_stay_as_they_are(run):
    groups = known(run)
    before = groups.columns("rollouts")
    for step in range(4, 400):
        write_step(run, step, {"f": [1.0], "g": [0.0], "h": [0.5], "i": [0.5]})
    groups.refresh()
    assert names(before) == ["1a", "1b", "2a", "2c", "3d", "3e"] and len(groups.columns("rollouts")) == 6 + 4 * 396
