"""The extras of tiercel: what each is for, and which of its packages are installed."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement

from tiercel.doctor.child import Child
from tiercel.doctor.packages import version_of
from tiercel.doctor.verdict import Status, Verdict

# Those that a user installs; the extra dev is for tests.
PURPOSES: Mapping[str, str] = {
    "demo": "the handwriting of tiercel demo",
    "data": "Parquet rows, and directories written by save_to_disk",
    "hub": "data sets from the hub by name",
    "video": "rows with video files",
    "rewards": "the rewards for mathematics, text distance, sets of boxes and JSON schemas",
    "quantize": "weights in 4 or 8 bits",
    "vllm": "rollout.engine: vllm, and tiercel serve",
    "deepspeed": "train.strategy: deepspeed",
    "view": "tiercel view",
    "trackers": "trackers; each package serves the tracker of its name",
    "notebook": "the notebook of the demo",
}


def extra_verdicts() -> Iterator[Verdict]:
    """Judge the packages of each extra that the installed tiercel has, by the installer's metadata, without importing
    them."""
    try:
        installed = metadata.metadata("tiercel").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        yield Verdict(name="extras", status="absent", found="tiercel was not installed by pip: its extras are unknown")
        return
    for extra in installed:
        if extra in PURPOSES:
            yield extra_verdict(extra, PURPOSES[extra], _requirements(extra))


def extra_verdict(extra: str, purpose: str, requirements: list[Requirement]) -> Verdict:
    """Judge an extra: `absent` where a package is not installed, `warning` where one has another version than tiercel
    asks for."""
    status: Status = "ok"
    found = []
    for requirement in requirements:
        version = version_of(requirement.name)
        if version is None:
            found.append(f"{requirement.name} not installed")
            status = "absent" if status == "ok" else status
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}; tiercel needs {requirement.specifier}")
            status = "warning"
        else:
            found.append(f"{requirement.name} {version}")
    return Verdict(
        name=f"extra {extra}",
        status=status,
        found=f"{', '.join(found)}; needed for {purpose}",
        remedy="" if status == "ok" else f"pip install 'tiercel[{extra}]'",
    )


def _requirements(extra: str) -> list[Requirement]:
    """Return what the extra adds to tiercel's own requirements, here, on this Python."""
    requirements = map(Requirement, metadata.requires("tiercel") or [])
    return [
        each
        for each in requirements
        if each.marker is not None
        and each.marker.evaluate({"extra": extra})
        and not each.marker.evaluate({"extra": ""})
    ]


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
        remedy="install vllm in a fresh environment, so that it chooses its own torch, and tiercel after it",
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
        "imports it if it is installed, and fails with it",
    ),
    "pyarrow": OptionalPackage(
        imports="pyarrow.parquet", needed_for="Parquet data", remedy="pip install --force-reinstall pyarrow"
    ),
    "datasets": OptionalPackage(
        imports="datasets", needed_for="data sets from the hub by name", remedy="pip install --upgrade datasets"
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
            failure = f"did not finish within {seconds:g} s"
    if failure is not None:
        return Verdict(name=title, status="broken", found=failure, remedy=optional.remedy)
    return Verdict(name=title, status="ok", found=f"in {time.monotonic() - started:.1f} s")
