"""Rewards that misbehave: what the fault measures, and that it would notice failures."""

import pytest

from benchmarks.faults import left_processes
from benchmarks.faults.left_processes import ENDINGS, HIDINGS, Case, cases_of
from benchmarks.faults.rewards import MISBEHAVIOURS, Misbehaviour, attempt


@pytest.mark.parametrize("name", ["raises KeyboardInterrupt", "leaves a daemon that forked twice"])
def test_a_misbehaviour_ends_as_promised(tmp_path, name):
    assert attempt(MISBEHAVIOURS[name], 3, 1, tmp_path)[0] == []


def test_what_is_not_as_promised_is_told(tmp_path):
    harmless = Misbehaviour(source="pass", lost="itself", says="a text")
    assert attempt(harmless, 2, 1, tmp_path)[0] == ["completion 1 got 1.0, None"]
    worse = Misbehaviour(source="1 / 0", lost="none")
    (problem,) = attempt(worse, 2, 0, tmp_path)[0]
    assert problem.startswith("completion 0 lost its value") and "ZeroDivisionError" in problem


@pytest.mark.parametrize("ending", ("kills what watches over it", "stops what watches over it", "loses its trainer"))
@pytest.mark.parametrize("hiding", ("one without descriptors, elsewhere", "one that forks without end"))
def test_no_process_is_left_whatever_is_done_to_the_supervisor(tmp_path, hiding, ending):
    assert left_processes.attempt(Case(hiding=hiding, ending=ending), tmp_path)[0] is None


def test_a_stopped_supervisor_whose_trainer_is_killed_leaves_nothing(tmp_path):
    ending = "stops what watches over it, loses its trainer"
    assert left_processes.attempt(Case(hiding="one by posix_spawn", ending=ending), tmp_path)[0] is None


def test_every_way_to_hide_meets_every_way_to_end():
    assert len(cases_of("full", 0)) == len(HIDINGS) * len(ENDINGS) >= 120


def test_a_process_that_is_left_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(left_processes, "SECONDS_TO_BE_GONE", 0.5)
    monkeypatch.setattr("tiercel.sandbox.process.kill_marked", lambda mark, variable: None)
    case = Case(hiding="one without an environment", ending="kills what watches over it")
    problem, _ = left_processes.attempt(case, tmp_path)
    assert problem is not None and "is left: sleep 600" in problem
