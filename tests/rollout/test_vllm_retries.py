"""How long a failing server is left alone, and when it is given up."""

from types import SimpleNamespace

import pytest

from tiercel.rollout.vllm import http
from tiercel.rollout.vllm.http import BACKOFF_SECONDS, NONSENSE, InvalidAnswer, ServerFault, ServerFaults


def test_pauses_grow_to_the_longest_and_begin_again_after_a_good_answer():
    faults = ServerFaults()
    assert [faults.add(ServerFault("gone")) for _ in range(7)] == [*BACKOFF_SECONDS, 10.0, 10.0]
    faults.in_a_row = 0
    assert faults.add(ServerFault("gone")) == BACKOFF_SECONDS[0] and not faults.are_too_wrong


def test_only_invalid_answers_make_a_server_unusable():
    faults = ServerFaults()
    for number in range(1, NONSENSE + 1):
        faults.add(ServerFault("gone"))
        faults.add(InvalidAnswer("3 places came"))
        assert faults.are_too_wrong == (number == NONSENSE)


@pytest.mark.parametrize(("moment", "is_over"), ((14.9, False), (15.0, True)))
def test_patience_counts_from_the_first_fault(monkeypatch, moment, is_over):
    clock = SimpleNamespace(monotonic=iter((5.0, moment)).__next__)
    monkeypatch.setattr(http, "time", clock)
    faults = ServerFaults()
    assert not faults.lasted(0.0)
    for _ in range(2):
        faults.add(ServerFault("gone"))
    assert faults.lasted(10.0) == is_over
