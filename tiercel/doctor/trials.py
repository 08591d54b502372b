"""Trying what a run depends on in children that may die of it: each dtype on each kind of device, collectives between
two processes, and imports of optional packages."""

import json
import re
import socket
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tiercel.doctor.child import Child
from tiercel.doctor.machine import gpu_verdicts, has_nvidia_driver
from tiercel.doctor.verdict import Verdict, texts
from tiercel.doctor.worker import GPUS, HANG, IMPORT, MARK, RANKS
from tiercel.reliability.card_faults import card_fault

WORKER = "tiercel.doctor.worker"
IMPORT_SECONDS, STEP_SECONDS = 90.0, 30.0

# Relative to float64 from the same rounded inputs: several times the rounding error of the dtype.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a step. `failure` is None where it finished; else `cause` is the signal that ended the child, or
    HANG, or empty."""

    step: str
    result: Any = None
    failure: str | None = None
    cause: str = ""


def device_verdicts() -> Generator[Verdict, None, int | None]:
    """Judge the CPU, the GPUs, and each dtype on both. Returns the number of GPUs, None where torch itself cannot be
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
    left = list(steps)
    while left:
        with Child(WORKER, "steps", device, json.dumps(dict(faults or {})), *left) as child:
            for outcome in _outcomes(child, tuple(left), import_seconds, step_seconds):
                yield outcome
                if outcome.step == IMPORT:
                    return
                left.remove(outcome.step)


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


def _outcomes(child: Child, steps: Sequence[str], import_seconds: float, step_seconds: float) -> Iterator[Outcome]:
    """Yield the outcomes of the steps that a child performs, up to the first that fails; an import that succeeds is
    left out."""
    left = [IMPORT, *steps]
    while left:
        seconds = import_seconds if left[0] == IMPORT else step_seconds
        try:
            line = child.line(seconds)
        except TimeoutError:
            yield Outcome(step=left[0], failure=f"no result within {seconds:g} s", cause=HANG)
            return
        if line is None:
            text, signal = child.ending()
            yield Outcome(step=left[0], failure=text, cause=signal)
            return
        message = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
        if "ends" in message:
            step = left.pop(0)
            if step != IMPORT:
                yield Outcome(step=step, result=message["result"])


TIMEOUT_SECONDS = 30.0


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


def collective_verdict(
    backend: str, environment: Mapping[str, str] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> Verdict:
    """Let two processes sum a tensor and gather objects. `environment` is added to theirs."""
    name = f"{backend} collectives"
    port, started = free_port(), time.monotonic()
    with ExitStack() as stack:
        arguments = [("collectives", backend, str(rank), str(port), str(timeout_seconds)) for rank in range(RANKS)]
        children = [stack.enter_context(Child(WORKER, *each, environment=environment)) for each in arguments]
        failures = _failures(children, started + IMPORT_SECONDS + timeout_seconds)
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


def _failures(children: Sequence[Child], deadline: float) -> list[str]:
    """Return the errors of the ranks that did not finish, each text once."""
    failures: list[str | None] = []
    for child in children:
        try:
            failures.append(child.failure(deadline))
        except TimeoutError:
            failures.append(child.last_error() or "no answer")
    return list(dict.fromkeys(filter(None, failures)))


def import_verdicts() -> Iterator[Verdict]:
    """Import each optional package in its own child and judge the result."""
    for name, advice in texts("advice")["packages"].items():
        yield import_verdict(name, advice)


def import_verdict(name: str, advice: Mapping[str, str], *, seconds: float = IMPORT_SECONDS) -> Verdict:
    """Judge whether a package can be imported; `absent` where it is not installed. `imports` of the advice is "module",
    or "module:attribute" where the package loads its parts late."""
    title, spec = f"import {name}", find_spec(name)
    if spec is None or spec.origin is None:  # without an origin: a plain directory of that name
        return Verdict(name=title, status="absent", found=f"not installed; needed for {advice['needed_for']}")
    started = time.monotonic()
    with Child(WORKER, "import", advice["imports"]) as child:
        try:
            failure = child.failure(started + seconds)
        except TimeoutError:
            failure = f"did not finish within {seconds:g} s"
    if failure is not None:
        return Verdict(name=title, status="broken", found=failure, remedy=advice["remedy"])
    return Verdict(name=title, status="ok", found=f"in {time.monotonic() - started:.1f} s")
