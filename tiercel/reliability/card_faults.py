"""What CUDA, Triton and Inductor say if a card, its driver or its compilers cannot run a program, and what to do. The
texts are those of public reports. This module does not need torch, so that `doctor` can read it."""

import re
import sys
from dataclasses import dataclass

OTHER_BUILD = "install a build of torch for this CUDA or later, or upgrade the driver"
OTHER_FORM = "write learner.form: dense, with which neither attention nor layers are compiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFault:
    """A kind of failure, known by its text."""

    code: str
    pattern: re.Pattern[str]
    meaning: str
    remedy: str


def _fault(code: str, pattern: str, meaning: str, remedy: str) -> CardFault:
    return CardFault(code=code, pattern=re.compile(pattern, re.IGNORECASE | re.DOTALL), meaning=meaning, remedy=remedy)


# The first that matches is taken. Inductor's "No valid triton configs" is followed by the reason, if there is one.
FAULTS = (
    _fault(
        "shared-memory",
        r"out of resources?: .{0,200}Required: ?\d+.{0,20}Hardware limit",  # pytorch #180278, triton #8182
        "a kernel needs more shared memory than a block of threads has on this card",
        OTHER_FORM,
    ),
    _fault(
        "ptxas",
        r"is not defined for option 'gpu-name'|PTXAS error",  # triton #8539
        "the assembler that came with Triton does not know this card",
        "pip install --upgrade torch, or set TRITON_PTXAS_PATH to the ptxas of a CUDA toolkit that knows the card",
    ),
    _fault(
        "nvrtc-library",
        r"failed to open libnvrtc",  # pytorch #58101, #93134
        "a library of CUDA's run-time compiler is missing, or is that of another CUDA",
        "pip install --force-reinstall torch, with the nvidia-* packages it asks for; remove CUDA from LD_LIBRARY_PATH",
    ),
    _fault(
        "nvrtc",
        r"nvrtc: error|nvrtc compil|NVRTC_ERROR",  # pytorch #47658
        "CUDA's run-time compiler does not know this card, or it failed",
        "install a build of torch for this card: it is newer than the build's CUDA",
    ),
    _fault(
        "driver",
        r"NVIDIA driver on your system is too old|driver version is insufficient|compiled with an unsupported toolchain"
        r"|unsupported display driver / cuda driver combination|forward compatibility was attempted",
        "the driver is older than this build of torch",
        OTHER_BUILD,
    ),
    _fault(
        "architecture",
        r"no kernel image is available for execution|device kernel image is invalid",
        "this build of torch has no code for this card",
        "install a build of torch for this card; the newest builds drop the oldest GPUs",
    ),
    _fault(
        "triton",
        r"No valid triton configs",
        "none of a kernel's configurations can be compiled for this card",
        OTHER_FORM,
    ),
)


def card_fault(text: str) -> CardFault | None:
    """Recognise the text of an error, or return None."""
    return next((fault for fault in FAULTS if fault.pattern.search(text)), None)


def triton_errors() -> tuple[type[Exception], ...]:
    """Return the class of Triton's own errors, which are no RuntimeErrors, if Triton was imported."""
    module = sys.modules.get("triton.errors")
    return () if module is None else (module.TritonError,)
