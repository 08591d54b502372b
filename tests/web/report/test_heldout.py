from collections.abc import Sequence

import pytest

from tests.web.report.fake_runs import completion, group, make_empty, write_lines
from tiercel.web.report.heldout import pairs_of, sorted_by_change
from tiercel.web.report.page_sections import held_out_part
from tiercel.web.report.pictures import Album
from tiercel.web.report.reading import GroupFile, read_groups, read_run


def evaluations(tmp_path, *verdicts_of_steps: Sequence[tuple[float | None, bool | None]]) -> list[GroupFile]:
    """Files of steps 0, 1, ...; a row per (total, is right)."""
    path = make_empty(tmp_path / "run")
    for step, verdicts in enumerate(verdicts_of_steps):
        lines = [
            group(f"row-{number}", f"question {number}", "x", [], [completion("x", {"mine": total}, correct)])
            for number, (total, correct) in enumerate(verdicts)
        ]
        write_lines(path / "evaluations" / f"step-{step:06d}.jsonl", lines)
    run = read_run(path)
    return [read_groups(run, "evaluations", step) for step in run.evaluation_steps]


def test_rows_are_counted_by_what_became_of_them(tmp_path):
    before = [(0, False), (1, True), (1, True), (0, False), (None, None)]
    after = [(1, True), (0, False), (1, True), (0, False), (1, True)]
    first, last = evaluations(tmp_path, before, after)
    by_change = sorted_by_change(pairs_of(first, last))
    assert {change: [after.group.id for _, after in pairs] for change, pairs in by_change.items()} == {
        "fixed": ["row-0", "row-4"],  # a row that could not be judged counts as wrong
        "broken": ["row-1"],
        "right": ["row-2"],
        "wrong": ["row-3"],
    }
    page = held_out_part([first, last], Album(tmp_path))
    assert "2 fixed against 1 broken: chance alone could do that (p = 1.00, exact McNemar test)." in page


def test_without_right_and_wrong_the_reward_decides(tmp_path):
    first, last = evaluations(
        tmp_path, [(0.1, None), (0.5, None), (0.3, None)], [(0.2, None), (0.5, None), (0.1, None)]
    )
    assert {change: len(pairs) for change, pairs in sorted_by_change(pairs_of(first, last)).items()} == {
        "better": 1,
        "same": 1,
        "worse": 1,
    }
    assert "McNemar" not in held_out_part([first, last], Album(tmp_path))


def test_rows_of_one_evaluation_only_are_counted(tmp_path):
    first, last = evaluations(tmp_path, [(0, False), (0, False)], [(1, True)])
    assert [after.group.id for _, after in pairs_of(first, last)] == ["row-0"]
    assert "1 row could not be paired." in held_out_part([first, last], Album(tmp_path))


@pytest.mark.parametrize("knows", [True, None])
def test_one_evaluation_is_shown_without_comparison(tmp_path, knows):
    (only,) = evaluations(tmp_path, [(1, knows), (0, knows and False)])
    page = held_out_part([only], Album(tmp_path))
    assert "nothing to compare it with yet" in page
    assert ("Wrong" in page) is (knows is True)
