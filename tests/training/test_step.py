"""Phases of a step: each has its seconds, and the watchdog is told about it."""

from types import SimpleNamespace

from tiercel.data.loader import StepBatch
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.training import step as step_module
from tiercel.training.step import Step


def no_more(indices):
    return StepBatch(step=0, prompts=(), rejected=())


def test_a_phase_counts_twice_where_it_comes_twice(monkeypatch):
    heartbeat, clock = Heartbeat(), [100.0]
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    step = Step(3, heartbeat, no_more)
    row = SimpleNamespace(row=SimpleNamespace(id="row-1"))
    step.batch = StepBatch(step=3, prompts=(row,), rejected=())
    for phase, seconds in (("rollout", 2.0), ("learn", 4.0), ("rollout", 3.0)):
        with step.phase(phase):
            assert (heartbeat.activity.phase, heartbeat.activity.step, heartbeat.activity.rows) == (
                phase,
                3,
                ("row-1",),
            )
            clock[0] += seconds
    clock[0] += 1.0
    times = step.times()
    assert (times["time/rollout"], times["time/learn"], times["time/step"]) == (5.0, 4.0, 10.0)
    assert heartbeat.activity.phases == 3 and step.updates_done == 4


def test_a_phase_may_count_with_another(monkeypatch):
    heartbeat, clock = Heartbeat(), [100.0]
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    step = Step(0, heartbeat, no_more)
    for name, timed_as in (("rollout", None), ("lookahead", "rollout")):
        with step.phase(name, (), timed_as=timed_as):
            assert heartbeat.activity.phase == name
            clock[0] += 2.0
    assert step.times() == {"time/rollout": 4.0, "time/step": 4.0}


def test_a_phase_may_be_about_other_rows_or_none():
    heartbeat = Heartbeat()
    step = Step(0, heartbeat, no_more)
    with step.phase("reward", ["row-9"]):
        assert heartbeat.activity.rows == ("row-9",)
    with step.phase("sync", ()):
        assert heartbeat.activity.rows == ()


def test_a_phase_aside_is_not_in_the_steps_seconds(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    step = Step(0, Heartbeat(), no_more)
    with step.untimed_phase("parity"):
        clock[0] += 5.0
    clock[0] += 2.0
    assert step.times() == {"time/step": 2.0}
