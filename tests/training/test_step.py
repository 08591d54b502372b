"""Phases of a step: each has its seconds, and the watchdog hears of it."""

import time
from types import SimpleNamespace

import pytest

from tiercel.data.loader import StepBatch
from tiercel.reliability.pulse import Pulse
from tiercel.training.step import Step


def test_a_phase_counts_twice_where_it_comes_twice():
    pulse = Pulse()
    step = Step(3, pulse)
    row = SimpleNamespace(row=SimpleNamespace(id="row-1"))
    step.batch = StepBatch(step=3, prompts=(row,), rejected=())
    for phase, seconds in (("rollout", 0.02), ("learn", 0.04), ("rollout", 0.02)):
        with step.phase(phase):
            assert (pulse.doing.phase, pulse.doing.step, pulse.doing.rows) == (phase, 3, ("row-1",))
            time.sleep(seconds)
    times = step.times()
    assert times["time/rollout"] == pytest.approx(0.04, abs=0.02)
    assert times["time/learn"] == pytest.approx(0.04, abs=0.02)
    assert times["time/step"] >= times["time/rollout"] + times["time/learn"]
    assert pulse.doing.phases == 3 and step.updates == 4


def test_a_phase_may_be_about_other_rows_or_none():
    pulse = Pulse()
    step = Step(0, pulse)
    with step.phase("reward", ["row-9"]):
        assert pulse.doing.rows == ("row-9",)
    with step.phase("sync", ()):
        assert pulse.doing.rows == ()


def test_a_phase_aside_is_not_in_the_steps_seconds():
    step = Step(0, Pulse())
    with step.aside("parity"):
        time.sleep(0.05)
    assert step.times()["time/step"] < 0.04
    assert set(step.times()) == {"time/step"}
