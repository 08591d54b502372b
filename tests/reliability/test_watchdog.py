"""The watchdog's own thread: it ends what stands still, leaves alone what does not, and says whose fault it is."""

import json
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tiercel.errors import EXIT_STALL
from tiercel.reliability.pulse import Pulse
from tiercel.reliability.watchdog import ANY_PHASE, Watchdog

LIMIT = 0.6


class Ends:
    """Exit codes that a watchdog would have ended its process with."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


def watchdog(run: Path, pulse: Pulse, ends: Ends, world_size: int = 1, **limits: float) -> Watchdog:
    return Watchdog(pulse, run, world_size, {ANY_PHASE: LIMIT, **limits}, end=ends)


def test_a_rank_that_stands_still_is_ended_with_its_stack_and_a_message(tmp_path, capsys):
    pulse, ends = Pulse(), Ends()
    with watchdog(tmp_path, pulse, ends):
        pulse.begin("reward", 4, ["row-7"])
        assert ends.happened.wait(10 * LIMIT)
    assert ends.codes == [EXIT_STALL]
    said = capsys.readouterr().err
    assert "stalled: no progress for" in said and "rank 0" in said and "phase reward of step 4, rows row-7" in said
    assert said.strip() in (tmp_path / "log.txt").read_text()
    assert "test_a_rank_that_stands_still" in (tmp_path / "stall/step-000004/rank-0.txt").read_text()
    assert json.loads((tmp_path / "stall/step-000004/signs.json").read_text())[0]["phase"] == "reward"


def test_progress_keeps_it_alive(tmp_path):
    pulse, ends = Pulse(), Ends()
    with watchdog(tmp_path, pulse, ends):
        for _ in range(12):
            time.sleep(LIMIT / 4)
            pulse.beat()
    assert not ends.codes
    assert not (tmp_path / "stall").exists()


def test_a_phase_may_have_a_longer_limit(tmp_path):
    pulse, ends = Pulse(), Ends()
    with watchdog(tmp_path, pulse, ends, load=60.0):
        pulse.begin("load", 0)
        time.sleep(2 * LIMIT)
        assert not ends.codes
        pulse.begin("learn", 0)
        assert ends.happened.wait(10 * LIMIT)


@pytest.mark.parametrize("culprit", (0, 1))
def test_of_two_ranks_the_one_that_the_other_waits_for_is_named(tmp_path, capsys, culprit):
    pulses, ends = [Pulse(0), Pulse(1)], [Ends(), Ends()]
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, pulses[rank], ends[rank], 2))
            pulses[rank].begin("learn", 2, [f"row-of-{rank}"])
        with pulses[1 - culprit].collective("gather (grpo.py:80)"):
            assert all(each.happened.wait(20 * LIMIT) for each in ends)
    assert [each.codes for each in ends] == [[EXIT_STALL]] * 2
    said = capsys.readouterr().err
    assert said.count("stalled:") == 1
    assert f"is in phase learn of step 2, rows row-of-{culprit}; the others wait for it" in said
    assert f"rank {1 - culprit} waits in gather (grpo.py:80)" in said
    assert {file.name for file in (tmp_path / "stall/step-000002").iterdir()} >= {"rank-0.txt", "rank-1.txt"}


def test_a_rank_that_waits_is_left_alone_while_the_other_makes_progress(tmp_path):
    pulses, ends = [Pulse(0), Pulse(1)], [Ends(), Ends()]
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, pulses[rank], ends[rank], 2))
        with pulses[0].collective("gather (grpo.py:80)"):
            for _ in range(12):
                time.sleep(LIMIT / 4)
                pulses[1].beat()
    assert not ends[0].codes and not ends[1].codes


def test_a_rank_that_says_nothing_any_more_is_named(tmp_path, capsys):
    pulse, ends = Pulse(0), Ends()
    with watchdog(tmp_path, pulse, ends, 2):
        pulse.begin("learn", 2)
        with pulse.collective("sum of gradients (update.py:9)"):
            assert ends.happened.wait(20 * LIMIT)
    said = capsys.readouterr().err
    assert "rank 1 gives no sign of life" in said
    assert "rank 0 waits in sum of gradients (update.py:9)" in said


def test_nothing_is_left_after_a_run_that_ended(tmp_path):
    with ExitStack() as dogs:
        for rank in (0, 1):
            dogs.enter_context(watchdog(tmp_path, Pulse(rank), Ends(), 2))
        time.sleep(LIMIT / 2)
        assert len(list((tmp_path / ".signs").iterdir())) >= 1
    assert not list((tmp_path / ".signs").iterdir())
    assert threading.active_count() == 1 or all(t.name != "watchdog" for t in threading.enumerate())
