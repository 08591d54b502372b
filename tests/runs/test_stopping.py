"""SIGTERM and SIGINT: the first is noted, the second ends the process, and the earlier handlers are restored."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tiercel.runs.ending import StopRequest


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGINT))
def test_the_first_signal_is_noted(number):
    with StopRequest() as stop:
        assert not stop.is_set
        signal.raise_signal(number)
        assert stop.is_set


def test_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.raises(RuntimeError), StopRequest():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
        raise RuntimeError
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("first", (signal.SIGTERM, signal.SIGINT))
def test_the_second_signal_ends_the_process_at_once(first):
    program = textwrap.dedent(
        f"""
        import signal, time
        from tiercel.runs.ending import SAME_STOP_SECONDS, StopRequest
        with StopRequest() as stop:
            signal.raise_signal({int(first)})
            signal.raise_signal({int(first)})  # of the launcher, which got the same
            print("noted", stop.is_set, flush=True)
            time.sleep(SAME_STOP_SECONDS + 0.1)
            signal.raise_signal(signal.SIGTERM)
            print("never", flush=True)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "noted True\n"
    assert result.returncode == -signal.SIGTERM


def test_a_second_interrupt_in_a_session_is_an_exception_and_not_its_end():
    program = textwrap.dedent(
        """
        import signal, sys, time
        from tiercel.runs.ending import SAME_STOP_SECONDS, StopRequest
        sys.ps1 = ">>> "
        try:
            with StopRequest():
                signal.raise_signal(signal.SIGINT)
                time.sleep(SAME_STOP_SECONDS + 0.1)
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("kept", flush=True)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.returncode) == ("kept\n", 0)
