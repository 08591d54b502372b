"""Disk, memory, processors and limits of this machine and of the container that this process is in, and the GPUs as
torch describes them."""

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.doctor.verdict import Status, Verdict
from tiercel.message_text import counted
from tiercel.packing.kernel_table import known_fits
from tiercel.processes import control_groups, usable_cores
from tiercel.reliability.card_faults import FAULTS

OTHER_BUILD = next(fault.remedy for fault in FAULTS if fault.code == "driver")
COMPILER = next(fault for fault in FAULTS if fault.code == "compiler")
GIGABYTE = 10**9
UNLIMITED_BYTES = 2**60  # version 1 of cgroups writes a number above it for "no limit"

LEAST_WORKING_DISK = 10 * GIGABYTE  # checkpoints, images and rollouts of a run
LEAST_TEMPORARY_DISK = GIGABYTE
LEAST_SHARED_MEMORY = GIGABYTE  # NCCL between the GPUs of a machine; containers give 64 MB by default
LEAST_OPEN_FILES = 1024
LEAST_PROCESSES = 4096  # threads count as well
LEAST_MEMORY = 4 * GIGABYTE

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
SHARED_MEMORY = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_DEVICE = Path("/dev/nvidiactl")
FIRST_WITH_BFLOAT16 = (8, 0)


def machine_verdicts(directory: Path) -> Iterator[Verdict]:
    """Judge the machine for a run in this directory."""
    yield disk("disk", directory, LEAST_WORKING_DISK, "free some space, or write runs elsewhere (output=...)")
    temporary = Path(tempfile.gettempdir())
    yield disk("temporary disk", temporary, LEAST_TEMPORARY_DISK, "free some space, or set TMPDIR to another directory")
    yield shared_memory(SHARED_MEMORY)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], cgroup_numbers("pids", "pids.max"))
    yield memory(total_memory(), memory_limits())
    yield processors(usable_cores(), cgroup_cores())


def disk(name: str, directory: Path, least_bytes: int, remedy: str) -> Verdict:
    """Judge the free space on the disk of `directory`, and whether it can be written."""
    free = shutil.disk_usage(directory).free
    if not os.access(directory, os.W_OK):
        return Verdict(name=name, status="broken", found=f"{directory} is not writable", remedy=remedy)
    status: Status = "broken" if free == 0 else "warning"
    return _verdict(name, free >= max(1, least_bytes), f"{_gigabytes(free)} free in {directory}", remedy, status)


def shared_memory(mount: Path) -> Verdict:
    """Judge the size and the free space of shared memory."""
    name = "shared memory"
    if not mount.is_dir():
        return Verdict(name=name, status="absent", found=f"no {mount}; NCCL uses it between the GPUs of a machine")
    size = shutil.disk_usage(mount)
    found = f"{_gigabytes(size.total)} at {mount}, {_gigabytes(size.free)} free"
    remedy = f"free some space in {mount}, or give the container more: docker run --shm-size=8g"
    return _verdict(name, min(size.free, size.total) >= LEAST_SHARED_MEMORY, found, remedy)


def open_files(limit: int) -> Verdict:
    """Judge the number of open files of a process. `limit` is as `resource` gives it."""
    is_enough = limit == resource.RLIM_INFINITY or limit >= LEAST_OPEN_FILES
    return _verdict("open files", is_enough, f"{_count(limit)} per process", f"ulimit -n {LEAST_OPEN_FILES} or more")


def processes(limit: int, cgroup_limits: list[int]) -> Verdict:
    """Judge the number of processes: the user's limit as `resource` gives it, or the container's if it is lower."""
    limits = [*cgroup_limits, *([] if limit == resource.RLIM_INFINITY else [limit])]
    if not limits:
        return Verdict(name="processes", status="ok", found="unlimited")
    lowest = min(limits)
    found = f"{_count(lowest)} processes and threads{' in this container' if lowest in cgroup_limits else ''}"
    remedy = (
        f"ulimit -u {LEAST_PROCESSES} or more (in a container, --pids-limit): each rank and worker has many threads"
    )
    return _verdict("processes", lowest >= LEAST_PROCESSES, found, remedy)


def memory(total: int, cgroup_limits: list[int]) -> Verdict:
    """Judge the memory in bytes: the machine's, or the container's if that is less."""
    limit = min(cgroup_limits, default=total)
    found = f"{_gigabytes(total)}"
    if limit < total:
        found = f"{_gigabytes(limit)} for this container, out of the machine's {_gigabytes(total)}"
    remedy = "use a larger machine, or raise the container's limit (--memory)"
    return _verdict("memory", min(limit, total) >= LEAST_MEMORY, found, remedy)


def processors(cores: int, quota: float | None) -> Verdict:
    """Judge the cores that this process may run on. `quota`: how many cores' time its container gets; None: all."""
    found = counted(cores, "core")
    if quota is None or quota >= cores:
        return Verdict(name="processors", status="ok", found=found)
    found = f"{found}, of which this container gets the time of {quota:.1f}"
    remedy = f"set train.threads to {max(1, int(quota))}: torch starts a thread per core, and they wait for each other"
    return Verdict(name="processors", status="warning", found=found, remedy=remedy)


def total_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_memory() -> int:
    """Return the bytes of this machine's memory, or the limit of this process's control groups if that is less."""
    return min([total_memory(), *memory_limits()])


def free_memory(meminfo: Path = MEMINFO) -> int:
    """Return the bytes that programs of this machine can still take, or the limit of this process's control groups
    if that is less."""
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.exists() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([allowed_memory(), *available])


def memory_limits() -> list[int]:
    """Read the limits of memory, in bytes, of this process's control groups."""
    return [*cgroup_numbers("memory", "memory.max"), *cgroup_numbers("memory", "memory.limit_in_bytes")]


def cgroup_numbers(controller: str, file: str, *, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Read the limits in that file of this process's control group and of all groups around it, for both versions of
    cgroups. Values that mean "no limit" are left out."""
    words = [line.split() for line in _cgroup_texts(controller, file, root, membership)]
    numbers = [int(first) for first, *_ in words if first.isdecimal()]
    return [number for number in numbers if number < UNLIMITED_BYTES]


def cgroup_cores(*, root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many cores' time this process's control groups allow; None: no limit."""
    pairs = [text.split() for text in _cgroup_texts("cpu", "cpu.max", root, membership)]
    quotas = _cgroup_texts("cpu", "cpu.cfs_quota_us", root, membership)
    periods = _cgroup_texts("cpu", "cpu.cfs_period_us", root, membership)
    pairs += [[quota, period] for quota, period in zip(quotas, periods, strict=False)]
    cores = [int(quota) / int(period) for quota, period in pairs if quota.isdecimal() and period.isdecimal()]
    return min(cores, default=None)


def _cgroup_texts(controller: str, file: str, root: Path, membership: Path) -> list[str]:
    """Read the file of this process's group first, then of the groups around it."""
    texts = []
    for group in control_groups(controller, root, membership):
        try:
            texts.append((group / file).read_text(encoding="utf-8").strip())
        except OSError:
            continue
    return [text for text in texts if text]


def _verdict(name: str, is_enough: bool, found: str, remedy: str, otherwise: Status = "warning") -> Verdict:
    if is_enough:
        return Verdict(name=name, status="ok", found=found)
    return Verdict(name=name, status=otherwise, found=found, remedy=remedy)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _gigabytes(value: int) -> str:
    return f"{value / GIGABYTE:.1f} GB"


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return DRIVER_FILE.exists() or DRIVER_DEVICE.exists()


def gpu_verdicts(facts: Mapping[str, Any], *, has_driver: bool) -> list[Verdict]:
    """Judge the GPUs by what `computations.gpu_facts` found in the child."""
    if facts["gpus"]:
        return [*_driver(facts), *(_gpu(index, gpu, facts) for index, gpu in enumerate(facts["gpus"]))]
    status: Status = "broken"
    found = f"an NVIDIA driver is installed, but torch sees no GPU: {facts['complaint'] or 'it does not say why'}"
    remedy = f"{OTHER_BUILD}; is CUDA_VISIBLE_DEVICES empty, or was the container started without --gpus?"
    if not has_driver:
        found = f"no NVIDIA driver; torch is built for {facts['built_for'] or 'the CPU'}"
        status, remedy = "absent", ""
    elif facts["built_for"] is None:
        found = "an NVIDIA driver is installed, but torch is built for the CPU and cannot use the GPU"
        status, remedy = "warning", "install a build of torch for CUDA"
    return [Verdict(name="gpus", status=status, found=found, remedy=remedy)]


def has_code_for(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build for these architectures ("sm_80", "sm_90a", "compute_90") runs on a GPU of that capability.

    Machine code ("sm") runs on the same major version from its minor version on; with an `a` only on its own
    capability; PTX ("compute") on its own capability and all later ones.
    """
    return any(_runs_on(architecture, capability) for architecture in architectures)


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    own = (int(match[2]), int(match[3]))
    if match[4] == "a":
        return own == capability
    return own <= capability and (match[1] == "compute" or own[0] == capability[0])


def _driver(facts: Mapping[str, Any]) -> list[Verdict]:
    if not facts["is_cuda"]:
        return []
    major, minor = facts["driver"] // 1000, facts["driver"] % 1000 // 10
    found = f"supports CUDA {major}.{minor}; torch is built for {facts['built_for']}"
    is_old = major < int(facts["built_for"].split(".")[0])
    status: Status = "broken" if is_old else "ok"
    return [Verdict(name="driver", status=status, found=found, remedy=OTHER_BUILD if is_old else "")]


def c_compiler(named: str | None, headers: Path) -> Verdict:
    """Judge what Triton compiles a part of each kernel with: the compiler that CC names, or else gcc or clang, and the
    directory of Python's headers."""
    names = [named] if named else ["gcc", "clang"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        lack = f"not found: {', '.join(names)}"
    else:
        lack = "" if (headers / "Python.h").is_file() else f"{found}, but no Python.h in {headers}"
    remedy = f"{COMPILER.remedy}; runs go on with uncompiled layers and learner.form: dense, which is slower"
    return _verdict("C compiler", not lack, lack or found or "", remedy)


def _heads_too_large(capability: tuple[int, int]) -> str:
    """List the heads for which the learner's kernels do not fit this card, by the table of kernels."""
    too_large = [fit for fit in known_fits() if fit.capability == capability and fit.problem]
    return ", ".join(dict.fromkeys(f"{fit.head_size} in {fit.dtype}" for fit in too_large))


def _gpu(index: int, gpu: Mapping[str, Any], facts: Mapping[str, Any]) -> Verdict:
    major, minor = gpu["capability"]
    found = f"{gpu['name']}, {gpu['memory'] / 1e9:.1f} GB"
    status: Status = "ok"
    remedy = ""
    if facts["is_cuda"]:
        found += f", compute capability {major}.{minor}"
        if not has_code_for(facts["architectures"], (major, minor)):
            found += f"; this torch has code only for {' '.join(facts['architectures'])}"
            status = "broken"
            remedy = "install a build of torch for this capability; the newest builds drop the oldest GPUs"
        elif (major, minor) < FIRST_WITH_BFLOAT16:
            found += ", without bfloat16"
            status, remedy = "warning", "set model.dtype: float16"
        elif too_large := _heads_too_large((major, minor)):
            found += f"; learner.form: flex does not fit heads of {too_large}, for which a run takes dense"
    return Verdict(name=f"gpu {index}", status=status, found=found, remedy=remedy)
