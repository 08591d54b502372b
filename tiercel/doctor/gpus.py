"""The GPUs as torch describes them, and whether this build of torch has code for them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.doctor.verdict import Status, Verdict

DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_DEVICE = Path("/dev/nvidiactl")
FIRST_WITH_BFLOAT16 = (8, 0)
OTHER_BUILD = "install a build of torch for this CUDA or later, or upgrade the driver"


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
    return Verdict(name=f"gpu {index}", status=status, found=found, remedy=remedy)
