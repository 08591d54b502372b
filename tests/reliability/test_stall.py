"""Which rank is at fault, from nothing but the ranks' last signals."""

import sys
from dataclasses import replace

from tiercel.reliability.stall import RankStatus, culprits, innermost_frames, is_stalled, stall_message, waiting_place

LIMIT = 10.0


def status(
    rank: int, *, quiet: float = 12.0, waits: str | None = "gather (grpo.py:80)", phases: int = 7, **more
) -> RankStatus:
    return RankStatus(
        rank=rank,
        phase="learn",
        phases=phases,
        step=3,
        waits_in=waits,
        quiet_seconds=quiet,
        limit_seconds=LIMIT,
        **more,
    )


def test_a_rank_that_waits_is_no_stall_while_another_makes_progress():
    waiting, working = status(0), status(1, quiet=0.5, waits=None)
    assert not is_stalled(0, [waiting, working])
    assert not is_stalled(1, [waiting, working])
    assert is_stalled(0, [waiting, replace(working, quiet_seconds=11.0)])
    assert is_stalled(0, [waiting, replace(working, is_silent=True)])


def test_a_rank_that_works_on_its_own_is_a_stall_whatever_others_do():
    assert is_stalled(1, [status(0, quiet=0.1), status(1, waits=None)])


def test_each_phase_has_its_own_limit():
    slow = replace(status(1, waits=None), limit_seconds=60.0)
    assert not is_stalled(0, [status(0), slow])


def test_the_one_that_waits_for_nobody_is_the_culprit():
    statuses = [status(0), status(1), status(2, waits=None, rows=("row-4", "row-5")), status(3)]
    assert [guilty.rank for guilty in culprits(statuses)] == [2]


def test_a_silent_rank_is_the_culprit_even_where_its_last_sign_waited():
    statuses = [status(0), status(1, is_silent=True), status(2)]
    assert [guilty.rank for guilty in culprits(statuses)] == [1]


def test_a_rank_that_could_not_speak_while_it_waited_is_not_blamed_for_one_that_stands_still():
    statuses = [status(0, is_silent=True), status(1, waits=None), status(2)]
    assert [guilty.rank for guilty in culprits(statuses)] == [1]
    at_work = [status(0, is_silent=True), status(1, waits=None, quiet=1.0), status(2)]
    assert [guilty.rank for guilty in culprits(at_work)] == [0]
    both = [status(0, is_silent=True, waits=None), status(1, waits=None), status(2)]
    assert [guilty.rank for guilty in culprits(both)] == [0]


def test_one_rank_in_another_place_than_most_is_the_culprit():
    statuses = [status(0), status(1), status(2, waits="sum of gradients (optimizer_step.py:9)", phases=8)]
    assert [guilty.rank for guilty in culprits(statuses)] == [2]
    behind = [status(0, phases=6), status(1), status(2)]
    assert [guilty.rank for guilty in culprits(behind)] == [0]


def test_of_two_the_one_that_is_further_left_out_a_collective():
    early = status(0, path=(("/training/grpo.py", 80), ("/training/optimizer_step.py", 260)))
    late = status(1, path=(("/training/grpo.py", 80), ("/training/optimizer_step.py", 270)))
    assert [guilty.rank for guilty in culprits([early, late])] == [1]
    assert [guilty.rank for guilty in culprits([replace(late, rank=0), replace(early, rank=1)])] == [0]
    assert [guilty.rank for guilty in culprits([replace(early, phases=9), late])] == [0]


def test_of_two_that_both_seem_to_work_the_one_behind_is_the_culprit():
    behind, ahead = status(0, waits=None, phases=6), status(1, waits=None)
    assert [guilty.rank for guilty in culprits([behind, ahead])] == [0]
    assert [guilty.rank for guilty in culprits([status(0, waits=None)])] == [0]


def test_nobody_is_the_culprit_where_all_wait_in_the_same_place(tmp_path):
    statuses = [status(0), status(1)]
    assert culprits(statuses) == ()
    assert "all ranks have waited in the same place, gather (grpo.py:80)" in stall_message(statuses, {}, tmp_path)


def test_a_rank_that_is_silent_beyond_the_limit_is_a_stall_while_this_one_works():
    working, silent = status(0, quiet=0.1, waits=None), status(1, quiet=0.0)
    assert not is_stalled(0, [working, silent.silent_for(9.0, LIMIT, "")])
    assert is_stalled(0, [working, silent.silent_for(10.0, LIMIT, "")])


def test_a_silent_rank_whose_process_computes_has_longer():
    working, silent = status(0, quiet=0.1, waits=None), status(1, quiet=0.0)
    assert not is_stalled(0, [working, silent.silent_for(29.0, LIMIT, "R")])
    assert is_stalled(0, [working, silent.silent_for(30.0, LIMIT, "R")])
    assert is_stalled(0, [working, silent.silent_for(10.0, LIMIT, "S")])


def test_a_rank_that_waits_long_and_is_silent_for_a_moment_is_no_stall():
    waiting, briefly_silent = status(0, quiet=3600.0), status(1, quiet=3600.0).silent_for(2.0, LIMIT, "")
    assert not is_stalled(0, [waiting, briefly_silent, status(2, quiet=0.5, waits=None)])
    assert is_stalled(0, [waiting, briefly_silent, status(2)])


def test_the_figures_are_those_of_a_rank_beyond_its_limit(tmp_path):
    late = status(0, quiet=3.0).silent_for(10.0, LIMIT, "T")
    text = stall_message([late, status(1, quiet=0.2)], {}, tmp_path)
    assert "no progress for 13 s (the limit is 10 s" in text
    assert "rank 0 gives no sign of life: a signal has stopped it (SIGSTOP or Ctrl-Z; SIGCONT resumes it)" in text
    assert "it was last in phase learn of step 3" in text
    left_out = [status(0, quiet=11.0), status(1, quiet=11.0), status(2, quiet=0.0, phases=8)]
    assert "no progress for 11 s (the limit is 10 s" in stall_message(left_out, {}, tmp_path)


def test_before_a_step_the_one_that_stands_still_is_the_culprit():
    stuck = replace(status(0, waits=None, phases=0), phase="import")
    importing = replace(status(1, waits=None, phases=0, quiet=0.1), phase="import")
    assert [guilty.rank for guilty in culprits([stuck, importing])] == [0]


def test_in_one_collective_the_one_whose_code_is_not_the_collectives_is_the_culprit(tmp_path):
    statuses = [status(0), status(1, is_inside=False)]
    assert [guilty.rank for guilty in culprits(statuses)] == [1]
    assert "rank 1 has entered gather (grpo.py:80), but is in other code there" in stall_message(statuses, {}, tmp_path)
    assert culprits([status(0, is_inside=False), status(1, is_inside=False)]) == ()


def test_the_message_names_rank_phase_rows_frames_and_who_waits(tmp_path):
    stack = (
        'Thread 0x1 (most recent call first):\n  File "watchdog.py", line 3 in _watch\n\n'
        'Current thread 0x2 (most recent call first):\n  File "user.py", line 8 in nap\n  File "grpo.py", line 7 in f\n'
    )
    statuses = [status(0), status(1, waits=None, rows=("row-4",), host="node", process=12), status(2)]
    text = stall_message(statuses, {1: stack}, tmp_path / "stall")
    assert "no progress for 12 s (the limit is 10 s" in text
    assert "rank 1 (node, process 12) is in phase learn of step 3, rows row-4; the others wait for it" in text
    assert 'File "user.py", line 8 in nap' in text
    assert "ranks 0, 2 wait in gather (grpo.py:80), phase learn of step 3" in text
    assert f"threads: {tmp_path / 'stall'}" in text and "reliability.stall_timeout" in text


def test_frames_are_those_of_the_last_thread():
    assert innermost_frames("") == []
    assert innermost_frames('Thread 1 (most recent call first):\n  File "a.py", line 1 in f\n') == [
        'File "a.py", line 1 in f'
    ]


def test_a_frame_of_torch_distributed_waits_and_others_do_not():
    assert waiting_place(sys._getframe()) is None
    library: dict = {}
    source = "def all_reduce(look):\n    return look()\n"
    exec(compile(source, "/packages/torch/distributed/distributed_c10d.py", "exec"), library)
    place = library["all_reduce"](lambda: waiting_place(sys._getframe(1)))
    assert place.startswith("all_reduce (reliability/test_stall.py:")
    assert library["all_reduce"](lambda: waiting_place(sys._getframe())) is None  # it calls other code, which works
