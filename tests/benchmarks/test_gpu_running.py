"""Cells that fail, that are absent, or that no time is left for, and runs that are compared."""

import json

import pytest

from benchmarks.gpu.killed import largest_difference
from benchmarks.gpu.report import NOT_MEASURED, summary
from benchmarks.gpu.results import Results
from benchmarks.gpu.running import ABSENT, DONE, FAILED, Cell, NotHere, run_cells, verdict
from benchmarks.gpu.setup import on_a_cpu


def cell(name, result=None, error=None) -> Cell:
    def run(setup):
        if error is not None:
            raise error
        return result

    return Cell(part="a", name=name, run=run)


CELLS = (
    cell("good", verdict(0.1, 0.2, "numbers")),
    cell("bad", verdict(float("nan"), 0.2, "numbers")),
    cell("broken", error=ValueError("a | b")),
    cell("missing", error=NotHere("no such key")),
)


def test_a_failure_leaves_a_row_and_the_others_go_on(tmp_path):
    file = tmp_path / "gpu.json"
    ended = run_cells(CELLS, on_a_cpu(), Results.read(file), seconds=60)
    assert ended.left == () and ended.wrong == ("a: bad", "a: broken")
    rows = json.loads(file.read_text())["rows"]
    assert [row["state"] for row in rows] == [DONE, DONE, FAILED, ABSENT]
    assert rows[2]["reason"] == "ValueError: a | b" and "raise error" in "".join(rows[2]["trace"])
    table = (tmp_path / "gpu.md").read_text()
    assert "| good | equal | 0.1 | 0.2 |" in table and "| bad | differs | nan | 0.2 |" in table
    assert "| broken | failed: ValueError: a / b | - | - |" in table
    assert "| missing | not here: no such key | - | - |" in table
    assert "1 of 3 within their limits (CPU)" in summary(rows)


def test_no_cell_begins_after_the_seconds_and_the_next_call_goes_on(tmp_path):
    file, setup = tmp_path / "gpu.json", on_a_cpu()
    assert run_cells(CELLS, setup, Results.read(file), seconds=-1).left == tuple(f"a: {each.name}" for each in CELLS)
    run_cells(CELLS[:1], setup, Results.read(file), seconds=60)
    ended = run_cells(CELLS, setup, Results.read(file), seconds=-1)
    assert "a: good" not in ended.left and len(ended.left) == 3


def test_a_cell_that_ended_its_process_is_not_tried_again(tmp_path):
    class Died(BaseException):
        """As a signal would end the process: nothing catches it."""

    file = tmp_path / "gpu.json"
    fatal = cell("fatal", error=Died())
    with pytest.raises(Died):
        run_cells([fatal], on_a_cpu(), Results.read(file), seconds=60)
    assert "| fatal | did not end | - | - |" in (tmp_path / "gpu.md").read_text()
    assert run_cells([fatal], on_a_cpu(), Results.read(file), seconds=60).left == ()


def test_rows_of_another_card_or_commit_are_measured_anew(tmp_path):
    file = tmp_path / "gpu.json"
    run_cells(CELLS[:1], on_a_cpu(), Results.read(file), seconds=60)
    stored = json.loads(file.read_text())
    stored["rows"][0] |= {"commit": "another"}
    file.write_text(json.dumps(stored))
    assert run_cells(CELLS[:1], on_a_cpu(), Results.read(file), seconds=-1).left == ("a: good",)


def test_without_results_every_row_of_the_summary_says_so():
    lines = summary([]).splitlines()[2:]
    assert len(lines) > 5 and all(f"| {NOT_MEASURED} |" in line for line in lines)


def test_runs_differ_by_their_largest_step():
    whole = [{"step": 1, "loss": 1.0, "grad_norm": 3.0}, {"step": 2, "loss": 0.0, "grad_norm": 1.0}]
    broken = [{"step": 1, "loss": 1.0, "grad_norm": 3.0}, {"step": 2, "loss": 0.5, "grad_norm": 1.0}]
    assert largest_difference(whole, whole) == 0 and largest_difference(whole, broken) == 0.5
    assert largest_difference(whole, broken[:1]) == float("inf")
