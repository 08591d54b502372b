"""Rewards that misbehave: what the fault measures, and that it would notice."""

import pytest

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
