"""All checks, in order."""

from collections.abc import Iterator
from pathlib import Path

from tiercel.doctor.machine import machine_verdicts
from tiercel.doctor.packages import package_verdicts
from tiercel.doctor.trials import collective_verdicts, device_verdicts, import_verdicts
from tiercel.doctor.verdict import Verdict


def examine(directory: Path) -> Iterator[Verdict]:
    """Judge this machine for runs in this directory; yield each verdict as soon as it is known."""
    yield from package_verdicts()
    yield from machine_verdicts(directory)
    gpu_count = yield from device_verdicts()
    if gpu_count is not None:
        yield from collective_verdicts(gpu_count)
    yield from import_verdicts()
