"""Whether a process works: from its processor time, its reading, its imports."""

import subprocess
import sys
import threading
import time
from types import ModuleType

from tiercel.reliability.work import WorkMonitor

SECONDS = 0.3


def test_a_process_knows_its_age():
    program = "import time; time.sleep(0.5); from tiercel.reliability.work import process_age; print(process_age())"
    age = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)
    assert 0.5 <= age < 60.0


def idle_after(deed) -> float:
    """Idle seconds that another thread sees, as the watchdog's does, while this one does something."""
    seen = []

    def look() -> None:
        work = WorkMonitor()
        for _ in range(4):
            time.sleep(SECONDS / 4)
            idle = work.idle_seconds()
        seen.append(idle)

    looker = threading.Thread(target=look)
    looker.start()
    deed()
    looker.join()
    return seen[0]


def test_a_process_that_sleeps_is_idle():
    assert idle_after(lambda: time.sleep(SECONDS)) >= SECONDS


def test_importing_is_progress_and_computing_alone_is_not(monkeypatch):
    monkeypatch.setattr("tiercel.reliability.work.OWN_THREAD", None)  # otherwise this thread's own work does not count
    work = WorkMonitor()
    began = work.progress
    for _ in range(2):
        compute(SECONDS / 2)
        work.idle_seconds()
    assert work.last_work_at > began and work.progress == began
    monkeypatch.setitem(sys.modules, "made_by_a_test", ModuleType("made_by_a_test"))
    time.sleep(SECONDS / 2)
    work.idle_seconds()
    assert work.progress > began


def test_a_moment_of_computing_is_no_work(monkeypatch):
    monkeypatch.setattr("tiercel.reliability.work.OWN_THREAD", None)
    work = WorkMonitor()
    for deed in (compute, time.sleep, compute, time.sleep):
        deed(SECONDS / 4)
        idle = work.idle_seconds()
    assert idle >= SECONDS


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def test_a_look_just_after_another_changes_nothing():
    work = WorkMonitor()
    time.sleep(SECONDS)
    before = work.idle_seconds()
    assert all(work.idle_seconds() >= before for _ in range(1000))


def test_a_process_that_computes_works():
    assert idle_after(lambda: compute(SECONDS)) < SECONDS


def test_a_process_that_imports_works(monkeypatch):
    def load() -> None:
        time.sleep(SECONDS / 2)
        monkeypatch.setitem(sys.modules, "made_by_a_test", ModuleType("made_by_a_test"))

    assert idle_after(load) < SECONDS
