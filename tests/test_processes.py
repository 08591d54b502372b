"""What the system tells about processes."""

import os
import signal
import subprocess
import sys

import pytest

from tiercel.processes import control_groups, launched_rank, process_fields, signal_name


@pytest.mark.skipif(sys.platform != "linux", reason="it has no /proc")
def test_a_process_that_is_there_has_fields_and_one_that_is_not_has_none():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    state, parent, *_ = process_fields(child.pid)
    assert state in "RSD" and int(parent) == os.getpid()
    child.communicate(b"\n")
    assert process_fields(child.pid) == []
    assert process_fields("self")[1] == str(os.getppid())


@pytest.mark.parametrize(
    ("variables", "rank"),
    (({}, None), ({"RANK": "3"}, None), ({"WORLD_SIZE": "8"}, None), ({"RANK": "3", "WORLD_SIZE": "8"}, 3)),
)
def test_a_rank_has_a_world(monkeypatch, variables, rank):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == rank


def test_a_signal_has_a_name_or_a_number():
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"


def test_a_group_comes_before_those_around_it(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("4:cpu,memory:/one/two\n3:devices:/other\n0::/pods\n")
    root = tmp_path / "mounted"
    of_version_1 = [root / "memory/one/two", root / "memory/one", root / "memory"]
    assert list(control_groups("memory", root, membership)) == [*of_version_1, root / "pods", root]
    assert list(control_groups("memory", root, tmp_path / "none")) == []
