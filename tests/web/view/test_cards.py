"""A row through its steps, and the answers of its completions."""

import gc

import pytest

from tests.web.report.fake_runs import completion, group, new_run, write_lines
from tiercel.runs.index import append_entry, file_entry
from tiercel.runs.records import GroupRecord, groups_path
from tiercel.web.report.cards import box_cell
from tiercel.web.view import cards
from tiercel.web.view.groups import Groups

STEPS = 20


def test_a_row_through_its_steps_holds_one_group_at_a_time(tmp_path, monkeypatch):
    run = new_run(tmp_path / "run", "# tiercel grpo\ntrain: {steps: 20}\n")
    for step in range(1, STEPS + 1):
        made = [completion(f"<answer>{step}</answer>", {"exact": 1.0}, True), completion("no", {"exact": 0.0}, False)]
        write_lines(groups_path(run, "rollouts", step), [group("a", "Which?", "x", [], made)])
        append_entry(run, file_entry(run, "rollouts", step))
    groups = Groups(run)
    groups.refresh()
    monkeypatch.setattr(cards, "drawn", lambda name, **given: given)
    before = alive()
    given = cards.row_part(run, "run", groups, "a")
    assert alive() - before <= 2
    (history,) = given["histories"]
    assert [each.step for each in history.steps] == list(range(1, STEPS + 1))
    assert history.steps[6].answers == [("right", "7", 1), ("wrong", "no", 1)]
    assert (history.steps[6].totals, history.steps[6].judged) == ([1.0, 0.0], [True, False])
    assert given["newest"].step == STEPS
    monkeypatch.undo()
    assert "answers-by-step" in cards.row_part(run, "run", groups, "a")


def alive() -> int:
    gc.collect()
    return sum(isinstance(each, GroupRecord) for each in gc.get_objects())


@pytest.mark.parametrize(
    ("opened", "answer", "box"), [("<think>\n", "", "no box"), ("", "[1, 2, 3, 4]?", "1, 2, 3, 4")]
)
def test_a_thought_that_the_template_opened_and_nothing_closed_is_no_answer(opened, answer, box):
    image = {"sha256": "0" * 64, "path": None, "original_size": [8, 8], "processed_size": [8, 8]}
    line = group("a", "Where?", [1, 2, 3, 4], [image], [completion("[1, 2, 3, 4]?", {"iou": 0.0}, False)])
    record = GroupRecord.from_json({**line, "prompt": line["prompt"] + opened})
    assert cards.answers_of(record) == [("wrong", answer, 1)]
    assert box_cell(record, record.completions[0]) == box
