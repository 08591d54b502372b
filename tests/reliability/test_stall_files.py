"""Stacks of all threads, with the main thread's at the expected place."""

import threading

from tiercel.reliability.stall import innermost_frames
from tiercel.reliability.stall_files import read_stack, write_stacks


def test_the_main_threads_stack_is_last_among_however_many_threads(tmp_path):
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(120)]
    for thread in threads:
        thread.start()
    try:
        write_stacks(tmp_path / "stall", 3)
    finally:
        ended.set()
    stack = read_stack(tmp_path / "stall", 3)
    assert stack.count("(most recent call first)") >= 121
    assert any("test_the_main_threads_stack_is_last" in frame for frame in innermost_frames(stack))
    assert read_stack(tmp_path / "stall", 0) == ""
