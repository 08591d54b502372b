"""The GPUs as torch describes them, and whether this build of torch has code for them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiercel.doctor.verdict import Verdict

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
    built_for = facts["built_for"]
    if not has_driver:
        build = f"torch is built for {built_for}" if built_for else "torch is built for the CPU"
        return [Verdict(name="gpus", status="absent", found=f"no NVIDIA driver; {build}")]
    if built_for is None:
        return [
            Verdict(
                name="gpus",
                status="warning",
                found="an NVIDIA driver is here, but torch is built for the CPU and cannot use the GPU",
                remedy="install a build of torch for CUDA",
            )
        ]
    return [
        Verdict(
            name="gpus",
            status="broken",
            found=f"an NVIDIA driver is here, but torch sees no GPU: {facts['complaint'] or 'it does not say why'}",
            remedy=f"{OTHER_BUILD}; is CUDA_VISIBLE_DEVICES empty, or the container started without --gpus?",
        )
    ]


def has_code_for(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a build for these architectures ("sm_80", "sm_90a", "compute_90") runs on a GPU of that capability.

    Machine code ("sm") runs on the same major version from its minor version on; with an `a` only on its own
    capability; PTX ("compute") on its own capability and all later ones.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if match is None:
            continue
        own = (int(match[2]), int(match[3]))
        if match[4] == "a":
            fits = own == capability
        elif match[1] == "sm":
            fits = own[0] == capability[0] and own <= capability
        else:
            fits = own <= capability
        if fits:
            return True
    return False


def _driver(facts: Mapping[str, Any]) -> list[Verdict]:
    if not facts["is_cuda"]:
        return []
    known = (facts["driver"] // 1000, facts["driver"] % 1000 // 10)
    found = f"knows CUDA {known[0]}.{known[1]}; torch is built for {facts['built_for']}"
    if known[0] < int(facts["built_for"].split(".")[0]):
        return [Verdict(name="driver", status="broken", found=found, remedy=OTHER_BUILD)]
    return [Verdict(name="driver", status="ok", found=found)]


def _gpu(index: int, gpu: Mapping[str, Any], facts: Mapping[str, Any]) -> Verdict:
    name = f"gpu {index}"
    capability = (gpu["capability"][0], gpu["capability"][1])
    found = f"{gpu['name']}, {gpu['memory'] / 1e9:.1f} GB"
    if not facts["is_cuda"]:
        return Verdict(name=name, status="ok", found=found)
    found += f", compute capability {capability[0]}.{capability[1]}"
    if not has_code_for(facts["architectures"], capability):
        return Verdict(
            name=name,
            status="broken",
            found=f"{found}; this torch has code for {' '.join(facts['architectures'])} only",
            remedy="install a build of torch that names this capability; the newest drop the oldest GPUs",
        )
    if capability < FIRST_WITH_BFLOAT16:
        return Verdict(
            name=name, status="warning", found=f"{found}, without bfloat16", remedy="set model.dtype: float16"
        )
    return Verdict(name=name, status="ok", found=found)
