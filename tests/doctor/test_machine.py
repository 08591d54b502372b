"""Limits worked by hand, and control groups of both versions as files."""

import resource

from tiercel.doctor.machine import (
    GIGABYTE,
    cgroup_cores,
    cgroup_numbers,
    disk,
    machine_verdicts,
    memory,
    open_files,
    processes,
    processors,
    shared_memory,
)


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return {"root": root / "cgroup", "membership": root / "membership"}


def test_version_2_takes_the_lowest_limit_of_the_group_and_of_those_around_it(tmp_path):
    files = {
        "membership": "0::/pods/one",
        "cgroup/pods/one/memory.max": "max",
        "cgroup/pods/memory.max": "8000000000",
        "cgroup/pods/one/cpu.max": "150000 100000",
        "cgroup/pods/cpu.max": "max 100000",
    }
    where = write(tmp_path, files)
    assert cgroup_numbers("memory", "memory.max", **where) == [8 * GIGABYTE]
    assert cgroup_cores(**where) == 1.5


def test_version_1_has_a_directory_for_each_controller_and_a_number_for_no_limit(tmp_path):
    files = {
        "membership": "4:memory:/one\n3:cpu,cpuacct:/\n0::/",
        "cgroup/memory/one/memory.limit_in_bytes": "4000000000",
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "cgroup/cpu/cpu.cfs_quota_us": "50000",
        "cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    where = write(tmp_path, files)
    assert cgroup_numbers("memory", "memory.limit_in_bytes", **where) == [4 * GIGABYTE]
    assert cgroup_cores(**where) == 0.5


def test_no_quota_and_no_control_groups_are_no_limit(tmp_path):
    where = write(tmp_path, {"membership": "3:cpu:/", "cgroup/cpu/cpu.cfs_quota_us": "-1"})
    assert cgroup_cores(**where) is None
    assert cgroup_cores(root=tmp_path / "none", membership=tmp_path / "none") is None
    assert cgroup_numbers("memory", "memory.max", root=tmp_path / "none", membership=tmp_path / "none") == []


def test_a_containers_memory_is_what_counts():
    verdict = memory(64 * GIGABYTE, [2 * GIGABYTE, 8 * GIGABYTE])
    assert (verdict.status, verdict.found) == ("warning", "2.0 GB for this container, out of the machine's 64.0 GB")
    assert memory(64 * GIGABYTE, []).status == "ok"


def test_a_quota_below_the_cores_is_told_with_the_threads_to_set():
    verdict = processors(8, 2.0)
    assert verdict.status == "warning" and "train.threads to 2" in verdict.remedy
    assert processors(8, 0.5).remedy.startswith("set train.threads to 1")
    assert processors(2, 2.0).status == processors(2, None).status == "ok"


def test_few_files_and_few_processes_are_warnings():
    assert open_files(256).status == "warning"
    assert open_files(resource.RLIM_INFINITY).found == "unlimited per process"
    assert processes(resource.RLIM_INFINITY, []).found == "unlimited"
    verdict = processes(100_000, [512])
    assert (verdict.status, verdict.found) == ("warning", "512 processes and threads in this container")


def test_disk_that_is_short_or_closed_is_told(tmp_path, monkeypatch):
    assert disk("disk", tmp_path, 2**80, "free some").status == "warning"
    assert disk("disk", tmp_path, 0, "free some").remedy == ""
    monkeypatch.setattr("os.access", lambda *_: False)
    assert disk("disk", tmp_path, 0, "free some").status == "broken"


def test_shared_memory_may_be_absent(tmp_path):
    assert shared_memory(tmp_path / "shm").status == "absent"


def test_this_machine_is_judged_in_full(tmp_path):
    verdicts = list(machine_verdicts(tmp_path))
    assert all(bool(verdict.remedy) == (verdict.status in ("warning", "broken")) for verdict in verdicts)
    names = [verdict.name for verdict in verdicts]
    assert names == ["disk", "temporary disk", "shared memory", "open files", "processes", "memory", "processors"]
