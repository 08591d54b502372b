"""The extras of tiercel: what each is for, and which of its packages are installed."""

from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement

from tiercel.doctor.packages import version_of
from tiercel.doctor.verdict import Status, Verdict

# Those that a user installs; the extra dev is for tests.
PURPOSES: Mapping[str, str] = {
    "demo": "the handwriting of tiercel demo",
    "data": "Parquet rows, and directories that save_to_disk wrote",
    "hub": "data sets of the hub by name",
    "video": "rows with video files",
    "rewards": "the rewards of mathematics, text distance, sets of boxes and JSON schemas",
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
        yield Verdict(
            name="extras", status="absent", found="tiercel was not installed by pip: its extras are not known"
        )
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
