"""Phases follow one another; each has its seconds, and the watchdog hears of it."""

import time

import pytest

from tiercel.reliability.pulse import Pulse
from tiercel.training.clock import Clock


def test_a_phase_lasts_until_the_next_and_counts_twice_where_it_comes_twice():
    pulse = Pulse()
    clock = Clock(pulse)
    for phase, seconds in (("rollout", 0.02), ("learn", 0.04), ("rollout", 0.02)):
        clock.begin(phase, 3, ["row-1"])
        assert (pulse.doing.phase, pulse.doing.step, pulse.doing.rows) == (phase, 3, ("row-1",))
        time.sleep(seconds)
    metrics = clock.metrics()
    assert metrics["time/rollout"] == pytest.approx(0.04, abs=0.02)
    assert metrics["time/learn"] == pytest.approx(0.04, abs=0.02)
    assert metrics["time/step"] >= metrics["time/rollout"] + metrics["time/learn"]
    assert pulse.doing.phases == 3


def test_what_comes_after_the_metrics_is_in_no_phase():
    clock = Clock(Pulse())
    clock.begin("learn", 0)
    before = clock.metrics()["time/learn"]
    time.sleep(0.02)
    assert clock.metrics()["time/learn"] == before
