"""Trying what a run depends on in children that may die of it: each dtype on each kind of device, collectives between
two processes, and imports of optional packages."""

import json
import os
import re
import socket
import sysconfig
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.doctor.machine import c_compiler, gpu_verdicts, has_nvidia_driver
from tiercel.doctor.verdict import Verdict, texts
from tiercel.doctor.worker import GPUS, HANG, IMPORT, RANKS
from tiercel.reliability.card_faults import card_fault
from tiercel.sandbox.process import ProcessJob, UserProcess

IMPORT_SECONDS, STEP_SECONDS, COLLECTIVE_SECONDS = 90.0, 30.0, 30.0
JOB = ProcessJob(name="a trial of the doctor", entry="tiercel.doctor.worker:run", work=None)
NO_LIMITS = Reliability(reward_memory_gb=1e9, reward_file_mb=1e9)

# Relative to float64 from the same rounded inputs: several times the rounding error of the dtype.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a step. `failure` is None if it finished; else `cause` is the signal that ended the child, or
    HANG, or empty."""

    step: str
    result: Any = None
    failure: str | None = None
    cause: str = ""


def outcome_of(process: UserProcess, seconds: float, task: str, *arguments: Any, step: str = "") -> Outcome:
    """Let a child do one of its tasks (worker.py), within these seconds."""
    request = json.dumps({"task": task, "arguments": arguments}).encode() + b"\n"
    answer = process.exchange(request, reply_count=1, timeout=seconds)
    if answer.interruption is None:
        return Outcome(step=step, result=answer.replies[0]["result"])
    if not answer.has_ended:
        return Outcome(step=step, failure=f"no result within {seconds:g} s", cause=HANG)
    if killed := re.search(r"SIG[A-Z]+", answer.interruption):
        return Outcome(step=step, failure=answer.interruption, cause=killed[0])
    return Outcome(step=step, failure=last_line(process) or answer.interruption)


def last_line(process: UserProcess) -> str:
    """Return the last line that a child has printed, which is that of its error if it ended by one."""
    return next((line.strip() for line in reversed(process.printed()) if line.strip()), "")


def device_verdicts() -> Generator[Verdict, None, int | None]:
    """Judge the CPU, the GPUs, and each dtype on both. Returns the number of GPUs, None if torch itself cannot be
    imported."""
    gpu_count = 0
    for outcome in try_steps("cpu", (*TOLERANCES, GPUS)):
        if outcome.step == IMPORT:
            yield judge(outcome, "torch")
            return None
        if outcome.step == GPUS and outcome.failure is None:
            gpu_count = len(outcome.result["gpus"])
            yield from gpu_verdicts(outcome.result, has_driver=has_nvidia_driver())
        else:
            yield judge(outcome, "torch" if outcome.step == GPUS else "cpu")
    if gpu_count:
        yield c_compiler(os.environ.get("CC"), Path(sysconfig.get_path("include")))
        for outcome in try_steps("cuda", tuple(TOLERANCES)):
            yield judge(outcome, "cuda")
    return gpu_count


def try_steps(
    device: str,
    steps: Sequence[str],
    faults: Mapping[str, str] | None = None,
    *,
    import_seconds: float = IMPORT_SECONDS,
    step_seconds: float = STEP_SECONDS,
) -> Iterator[Outcome]:
    """Try each step and yield its outcome, in order. A step that fails ends its child, and a new child tries the rest.
    Where torch cannot be imported, that is the only outcome."""
    left, faults = list(steps), faults or {}
    while left:
        with closing(UserProcess(JOB, NO_LIMITS)) as process:
            process.load()
            for step in (IMPORT, *left):
                seconds = import_seconds if step == IMPORT else step_seconds
                outcome = outcome_of(process, seconds, "step", device, step, faults.get(step), step=step)
                if step == IMPORT and outcome.failure is None:
                    continue
                yield outcome
                if step == IMPORT:
                    return
                left.remove(step)
                if outcome.failure is not None:
                    break


def judge(outcome: Outcome, device: str) -> Verdict:
    """Judge the outcome of a step on a device."""
    name = f"{device} {outcome.step}"
    if outcome.failure is not None:
        remedies, fault = texts("advice")["faults"], card_fault(outcome.failure)
        remedy = fault.remedy if fault else remedies.get(outcome.cause, remedies["other"])
        return Verdict(name=name, status="broken", found=outcome.failure, remedy=remedy)
    tolerance = TOLERANCES[outcome.step]
    errors = ", ".join(f"{operation} {error:.1e}" for operation, error in outcome.result.items())
    if all(error <= tolerance for error in outcome.result.values()):  # NaN is not
        return Verdict(name=name, status="ok", found=f"forward and backward match float64 up to {errors}")
    found = f"wrong result: off by {errors}; rounding explains at most {tolerance:g}"
    remedy = "set model.dtype to one that is correct here; pip install --upgrade torch, and check the device"
    return Verdict(name=name, status="broken", found=found, remedy=remedy)


def collective_verdicts(gpu_count: int) -> Iterator[Verdict]:
    """Judge the machine's name, then each backend that a run here would use."""
    yield host_name(socket.gethostname())
    yield collective_verdict("gloo")
    if gpu_count >= RANKS:
        yield collective_verdict("nccl")


def host_name(name: str) -> Verdict:
    """Judge whether the machine's name resolves: gloo asks for its address."""
    try:
        address = socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME; ranks on other machines will not find this one"
        found = f"{name} does not resolve: {error}"
        return Verdict(name="host name", status="warning", found=found, remedy=remedy)
    return Verdict(name="host name", status="ok", found=f"{name} resolves to {address}")


def collective_verdict(backend: str, *, timeout_seconds: float = COLLECTIVE_SECONDS) -> Verdict:
    """Let two processes sum a tensor and gather objects."""
    name, port = f"{backend} collectives", free_port()

    def failure(rank: int) -> str | None:
        with closing(UserProcess(JOB, NO_LIMITS)) as process:
            process.load()
            seconds = IMPORT_SECONDS + timeout_seconds
            outcome = outcome_of(process, seconds, "collectives", backend, rank, port, timeout_seconds)
            return (last_line(process) or "no answer") if outcome.cause == HANG else outcome.failure or outcome.result

    with ThreadPoolExecutor(RANKS) as ranks:
        failures = list(dict.fromkeys(filter(None, ranks.map(failure, range(RANKS)))))
    if failures:
        return Verdict(name=name, status="broken", found="; ".join(failures), remedy=likely_cause(" ".join(failures)))
    found = f"all_reduce and all_gather_object between {RANKS} processes"
    return Verdict(name=name, status="ok", found=found)


def likely_cause(error: str) -> str:
    """Return the remedy for an error of the processes."""
    causes = texts("advice")["collectives"]  # a pattern of the error, and the cause with the remedy; the last fits any
    cause = next(cause for pattern, cause in causes if re.search(pattern, error, re.IGNORECASE))
    return cause.format(", ".join(name for _, name in socket.if_nameindex()))


def free_port() -> int:
    """Return a TCP port of the loopback interface that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def import_verdicts() -> Iterator[Verdict]:
    """Import each optional package in its own child and judge the result."""
    for name, advice in texts("advice")["packages"].items():
        yield import_verdict(name, advice)


def import_verdict(name: str, advice: Mapping[str, str], *, seconds: float = IMPORT_SECONDS) -> Verdict:
    """Judge whether a package can be imported; `absent` if it is not installed. `imports` of the advice is "module",
    or "module:attribute" if the package loads its parts late."""
    title, spec = f"import {name}", find_spec(name)
    if spec is None or spec.origin is None:  # without an origin: a plain directory of that name
        return Verdict(name=title, status="absent", found=f"not installed; needed for {advice['needed_for']}")
    started = time.monotonic()
    with closing(UserProcess(JOB, NO_LIMITS)) as process:
        process.load()
        failure = outcome_of(process, seconds, "import", advice["imports"]).failure
    if failure is not None:
        return Verdict(name=title, status="broken", found=failure, remedy=advice["remedy"])
    return Verdict(name=title, status="ok", found=f"in {time.monotonic() - started:.1f} s")
