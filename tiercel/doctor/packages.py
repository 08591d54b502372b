"""Versions, read from the installer's metadata without importing, against what packages require of each other."""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tiercel.doctor.pairs import judge_pairs
from tiercel.doctor.verdict import Verdict

REQUIRED = ("torch", "transformers", "tokenizers", "huggingface-hub", "peft", "safetensors", "pillow", "numpy")
OPTIONAL = ("torchvision", "bitsandbytes", "vllm", "deepspeed", "flash-attn")  # judged where they are installed
OWNERS = ("tiercel", "transformers", "peft", "torchvision", "vllm", "deepspeed")  # whose requirements are checked
EXTRAS = ("", "quantize", "vllm", "deepspeed")  # of tiercel; their ranges hold for whatever is installed

# Compiled for one version of torch. With another they fail, some at import and some only when they are used.
# https://github.com/vllm-project/vllm/issues/13608
BOUND_TO_TORCH = ("torchvision", "vllm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The range of versions that `owner` requires of a package."""

    owner: str
    range: SpecifierSet


def package_verdicts() -> Iterator[Verdict]:
    """Judge Python, every package that tiercel needs, and the versions that are known to fail together."""
    yield judge_python(platform.python_version())
    needs = needs_by_package()
    for name in (*REQUIRED, *OPTIONAL):
        if name in REQUIRED or _is_installed(name):
            yield judge_package(name, _field(name, "Version"), needs.get(name, []))
    yield from judge_pairs(version_of)


def judge_python(running: str) -> Verdict:
    """Compare a version of Python with the range in tiercel's metadata."""
    wanted = _field("tiercel", "Requires-Python") or ""
    if SpecifierSet(wanted).contains(running, prereleases=True):
        return Verdict(name="python", status="ok", found=running)
    found = f"{running}; tiercel needs {wanted}"
    return Verdict(name="python", status="broken", found=found, remedy=f"install Python {wanted}")


def judge_package(name: str, version: str | None, needs: list[Need]) -> Verdict:
    """Judge a package. `version` is None where it is not installed, or where its metadata has none."""
    if version is None:
        is_damaged = _is_installed(name)
        found = "its metadata has no version: partly removed, or overwritten" if is_damaged else "not installed"
        again = " --force-reinstall" if is_damaged else ""
        return Verdict(name=name, status="broken", found=found, remedy=f"pip install{again} {name}")
    unmet = [need for need in needs if not _meets(version, need.range)]
    if not unmet:
        return Verdict(name=name, status="ok", found=version)
    is_fatal = any(need.owner == "tiercel" or (need.owner in BOUND_TO_TORCH and name == "torch") for need in unmet)
    ranges = SpecifierSet(",".join(str(need.range) for need in needs))
    return Verdict(
        name=name,
        status="broken" if is_fatal else "warning",
        found=f"{version}; {', '.join(f'{need.owner} needs {need.range}' for need in unmet)}",
        remedy=f"pip install '{name}{ranges}'; if no version suits all, upgrade {unmet[0].owner}",
    )


def needs_by_package() -> Mapping[str, list[Need]]:
    """Return what the installed packages among OWNERS require, by package."""
    needs: dict[str, list[Need]] = {}
    for owner in OWNERS:
        for requirement in _requirements(owner):
            if requirement.specifier:
                need = Need(owner=owner, range=requirement.specifier)
                needs.setdefault(canonicalize_name(requirement.name), []).append(need)
    return needs


def version_of(name: str) -> Version | None:
    """Return the installed version; None where there is none, or none that can be compared."""
    text = _field(name, "Version")
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


def _requirements(owner: str) -> Iterator[Requirement]:
    try:
        lines = metadata.requires(owner) or []
    except metadata.PackageNotFoundError:
        return
    extras = EXTRAS if owner == "tiercel" else ("",)
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _is_installed(name: str) -> bool:
    return _metadata(name) is not None


def _field(name: str, field: str) -> str | None:
    """Return a field of a distribution's metadata; None where it is missing, or the package is not installed."""
    found = _metadata(name)
    return found[field] if found is not None and field in found else None


def _metadata(name: str) -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None


def _meets(version: str, wanted: SpecifierSet) -> bool:
    try:
        return wanted.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # nothing to compare
