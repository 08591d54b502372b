"""Whether the optional packages that are installed can be imported."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from tiercel.doctor.child import Child
from tiercel.doctor.verdict import Verdict

IMPORT_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionalPackage:
    """A package that tiercel can do without. `imports`: "module", or "module:attribute" where the package loads its
    parts late."""

    imports: str
    needed_for: str
    remedy: str


OPTIONALS = {
    "vllm": OptionalPackage(
        imports="vllm:LLM",
        needed_for="rollout.engine: vllm, and tiercel serve",
        remedy="install vllm in a fresh environment, where it chooses its torch, and tiercel after it",
    ),
    "deepspeed": OptionalPackage(
        imports="deepspeed",
        needed_for="train.strategy: deepspeed",
        remedy="pip install --upgrade deepspeed; without nvcc, DS_BUILD_OPS=0 pip install --force-reinstall deepspeed",
    ),
    "torchvision": OptionalPackage(
        imports="torchvision",
        needed_for="nothing: tiercel reads images with Pillow",
        remedy="pip install --upgrade torch torchvision from one index, or pip uninstall torchvision: transformers "
        "imports it where it is installed, and fails with it",
    ),
    "pyarrow": OptionalPackage(
        imports="pyarrow.parquet", needed_for="Parquet data", remedy="pip install --force-reinstall pyarrow"
    ),
    "datasets": OptionalPackage(
        imports="datasets", needed_for="data sets of the hub by name", remedy="pip install --upgrade datasets"
    ),
}


def import_verdicts() -> Iterator[Verdict]:
    """Import each package in its own child and judge the result."""
    for name, optional in OPTIONALS.items():
        yield import_verdict(name, optional)


def import_verdict(name: str, optional: OptionalPackage, *, seconds: float = IMPORT_SECONDS) -> Verdict:
    """Judge whether a package can be imported; `absent` where it is not installed."""
    title = f"import {name}"
    spec = find_spec(name)
    if spec is None or spec.origin is None:  # without an origin: a plain directory of that name
        return Verdict(name=title, status="absent", found=f"not installed; needed for {optional.needed_for}")
    started = time.monotonic()
    with Child("tiercel.doctor.import_worker", optional.imports) as child:
        try:
            while child.line(started + seconds - time.monotonic()) is not None:
                pass
            ending = child.ending()
            failure = ending.text if ending.exit_code != 0 else None
        except TimeoutError:
            failure = f"does not end within {seconds:g} s"
    if failure is not None:
        return Verdict(name=title, status="broken", found=failure, remedy=optional.remedy)
    return Verdict(name=title, status="ok", found=f"in {time.monotonic() - started:.1f} s")
