"""What is waited for is reported once it takes longer than a moment, and never afterwards."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tiercel.log import printed
from tiercel.runs.progress import entered, waiting


def test_what_takes_long_is_said_once():
    said: list[str] = []
    heard = threading.Event()
    with printed(lambda text: (said.append(text), heard.set())), waiting("loading m, 7.1 GB", show_after=0.01):
        assert heard.wait(10)
    assert said == ["loading m, 7.1 GB ..."]


def test_nothing_is_said_after_the_end():
    said: list[str] = []
    with printed(said.append), waiting("loading", show_after=60):
        pass
    with printed(said.append), pytest.raises(ValueError, match="broken"), waiting("loading", show_after=60):
        raise ValueError("broken")
    assert said == [] and not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


def test_a_context_is_waited_for_until_it_is_entered(monkeypatch):
    said: list[str] = []
    order: list[str] = []

    @contextmanager
    def slow() -> Iterator[int]:
        while not said:
            time.sleep(0.01)
        yield 7
        order.append("closed")

    monkeypatch.setattr(waiting.__wrapped__, "__defaults__", (0.01,))
    with printed(said.append), entered(slow(), "starting the vllm engine") as value:
        order.append(f"in {value}")
    assert said == ["starting the vllm engine ..."] and order == ["in 7", "closed"]
