"""Trying every dtype on every kind of device, in children that may die of it."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.doctor.child import Child
from tiercel.doctor.gpus import gpu_verdicts, has_nvidia_driver
from tiercel.doctor.step_worker import GPUS, HANG, IMPORT, MARK
from tiercel.doctor.verdict import Verdict

IMPORT_SECONDS, STEP_SECONDS = 90.0, 30.0

# Relative to float64 from the same rounded inputs: several times the rounding error of the dtype.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}

# By the signal that ended the child, or by another kind of failure.
REMEDIES = {
    "SIGFPE": "pip install --upgrade torch, which brings a newer nvidia-cublas (12.4.5.8 at least), or set "
    "model.dtype: float32",
    "SIGILL": "install a build of torch for this processor, or set ATEN_CPU_CAPABILITY=default",
    "SIGSEGV": "pip install --force-reinstall torch, with the nvidia-* packages it asks for",
    "SIGBUS": "make room in /dev/shm and on the disk, then pip install --force-reinstall torch",
    "SIGKILL": "usually the system ran out of memory: free some, or raise the container's limit",
    HANG: "stop whatever else uses the device; if it hangs on its own, upgrade torch and the driver",
}
OTHER_REMEDY = "pip install --force-reinstall torch; for a GPU, also check nvidia-smi"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a step. `failure` is None where it finished; else `cause` is a key of REMEDIES, or "error"."""

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
        with Child("tiercel.doctor.step_worker", device, json.dumps(dict(faults or {})), *left) as child:
            for outcome in _outcomes(child, tuple(left), import_seconds, step_seconds):
                yield outcome
                if outcome.step == IMPORT:
                    return
                left.remove(outcome.step)


def judge(outcome: Outcome, device: str) -> Verdict:
    """Judge the outcome of a step on a device."""
    name = f"{device} {outcome.step}"
    if outcome.failure is not None:
        remedy = REMEDIES.get(outcome.cause, OTHER_REMEDY)
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
            ending = child.ending()
            yield Outcome(step=left[0], failure=ending.text, cause=ending.signal or "error")
            return
        message = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else {}
        if "ends" in message:
            step = left.pop(0)
            if step != IMPORT:
                yield Outcome(step=step, result=message["result"])
