"""Versions, read from the installer's metadata without importing, against what packages require of each other, against
the extras of tiercel, and against the versions that are known to fail together (pairs.json)."""

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tiercel.doctor.verdict import Status, Verdict, texts
from tiercel.errors import EnvironmentProblem

REQUIRED = ("torch", "transformers", "tokenizers", "huggingface-hub", "peft", "safetensors", "pillow", "numpy")
OPTIONAL = ("torchvision", "bitsandbytes", "vllm", "deepspeed", "flash-attn")  # judged if they are installed
OWNERS = ("tiercel", "transformers", "peft", "torchvision", "vllm", "deepspeed")  # whose requirements are checked
EXTRAS = ("", "quantize", "vllm", "deepspeed")  # of tiercel; their ranges hold for whatever is installed

# Compiled for one version of torch. With another they fail, some at import and some only when they are used.
# https://github.com/vllm-project/vllm/issues/13608
BOUND_TO_TORCH = ("torchvision", "vllm")


def package_verdicts() -> Iterator[Verdict]:
    """Judge Python, every package that tiercel needs, the versions that are known to fail together, and the extras."""
    yield judge_python(platform.python_version())
    needs = [(owner, each) for owner in OWNERS for each in _requirements(owner) if each.specifier]
    for name in (*REQUIRED, *OPTIONAL):
        if name in REQUIRED or _metadata(name) is not None:
            own = {owner: each.specifier for owner, each in needs if canonicalize_name(each.name) == name}
            yield judge_package(name, own)
    yield from judge_pairs(version_of)
    yield from extra_verdicts()


def judge_python(running: str) -> Verdict:
    """Compare a version of Python with the range in tiercel's metadata."""
    wanted = _field("tiercel", "Requires-Python") or ""
    if SpecifierSet(wanted).contains(running, prereleases=True):
        return Verdict(name="python", status="ok", found=running)
    found = f"{running}; tiercel needs {wanted}"
    return Verdict(name="python", status="broken", found=found, remedy=f"install Python {wanted}")


def judge_package(name: str, needs: Mapping[str, SpecifierSet]) -> Verdict:
    """Judge a package by the ranges of versions that others require of it, by their names."""
    version = _field(name, "Version")
    if version is None:
        is_damaged = _metadata(name) is not None
        found = "its metadata has no version: partly removed, or overwritten" if is_damaged else "not installed"
        again = " --force-reinstall" if is_damaged else ""
        return Verdict(name=name, status="broken", found=found, remedy=f"pip install{again} {name}")
    comparable = version_of(name)
    unmet = [owner for owner in needs if comparable and not needs[owner].contains(comparable, prereleases=True)]
    if not unmet:
        return Verdict(name=name, status="ok", found=version)
    is_fatal = "tiercel" in unmet or (name == "torch" and bool({*unmet} & {*BOUND_TO_TORCH}))
    ranges = SpecifierSet(",".join(map(str, needs.values())))
    return Verdict(
        name=name,
        status="broken" if is_fatal else "warning",
        found=f"{version}; {', '.join(f'{owner} needs {needs[owner]}' for owner in unmet)}",
        remedy=f"pip install '{name}{ranges}'; if no version suits all, upgrade {unmet[0]}",
    )


def _is_other_release(torch: Version, torchvision: Version) -> bool:
    """Whether the two are of different releases: torch 2.N needs torchvision 0.(N + 15). Pre-releases, which containers
    have, are built for each other."""
    if torch.is_prerelease or torchvision.is_prerelease or torch.major != 2 or torchvision.major != 0:
        return False
    return torchvision.minor != torch.minor + 15


RULES: dict[str, Callable[..., bool]] = {
    "release": _is_other_release,
    "cpu": lambda torch, torchvision: torch.local == "cpu" and torchvision.local != "cpu",
}


def is_bad(pair: Mapping[str, Any], versions: Sequence[Version]) -> bool:
    """Return whether these versions of a pair's packages fail together. An entry of pairs.json has ranges in the order
    of its packages, one list for each way to fail, or names a rule."""
    if "is_bad" in pair:
        return RULES[pair["is_bad"]](*versions)
    ways = [zip(map(SpecifierSet, ranges), versions, strict=True) for ranges in pair["versions"]]
    return any(all(each.contains(version, prereleases=True) for each, version in way) for way in ways)


def judge_pairs(version_of: Callable[[str], Version | None]) -> list[Verdict]:
    """Return a verdict for each pair that the installed versions match, or one that says that none does."""
    verdicts = []
    for pair in texts("pairs"):
        names = pair["packages"]
        versions = [version for name in names if (version := version_of(name)) is not None]
        if len(versions) == len(names) and is_bad(pair, versions):
            installed = ", ".join(f"{name} {version}" for name, version in zip(names, versions, strict=True))
            found = f"{installed}: {pair['happens']}"
            name, status, remedy = " and ".join(names), pair["status"], pair["remedy"]
            verdicts.append(Verdict(name=name, status=status, found=found, remedy=remedy))
    return verdicts or [Verdict(name="known bad pairs", status="ok", found=f"none of {len(texts('pairs'))}")]


def extra_verdicts() -> Iterator[Verdict]:
    """Judge the packages of each extra that the installed tiercel has."""
    if (installed := _metadata("tiercel")) is None:
        yield Verdict(name="extras", status="absent", found="tiercel was not installed by pip: its extras are unknown")
        return
    purposes = texts("advice")["extras"]  # of those that a user installs; dev is for tests
    for extra in installed.get_all("Provides-Extra") or []:
        if extra in purposes:
            yield extra_verdict(extra, purposes[extra])


def extra_verdict(extra: str, purpose: str) -> Verdict:
    """Judge an extra: `absent` if a package is not installed, `warning` if one has another version than tiercel
    asks for."""
    status: Status = "ok"
    found = []
    plain = list(_requirements("tiercel", ("",)))
    for requirement in [each for each in _requirements("tiercel", (extra,)) if each not in plain]:
        version = version_of(requirement.name)
        if version is None:
            found.append(f"{requirement.name} not installed")
            status = "absent" if status == "ok" else status
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version}; tiercel needs {requirement.specifier}")
            status = "warning"
        else:
            found.append(f"{requirement.name} {version}")
    text = f"{', '.join(found)}; needed for {purpose}"
    remedy = "" if status == "ok" else f"pip install 'tiercel[{extra}]'"
    return Verdict(name=f"extra {extra}", status=status, found=text, remedy=remedy)


def blame_packages(error: Exception) -> None:
    """Raise EnvironmentProblem if an import failed because of packages that are known not to fit together."""
    text = "".join(traceback.format_exception(error)).replace("_", "-")
    for verdict in judge_pairs(version_of):
        if any(name in text for name in verdict.name.split(" and ") if name not in ("torch", "transformers", "numpy")):
            raise EnvironmentProblem(f"{verdict.found}; {verdict.remedy}") from error


def imported(module: str) -> Any:
    """Import a module that loads torch. Raises EnvironmentProblem if packages that do not fit together prevent
    it."""
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:
        blame_packages(error)
        raise


def version_of(name: str) -> Version | None:
    """Return the installed version; None if there is none, or none that can be compared."""
    try:
        return Version(_field(name, "Version") or "none")
    except InvalidVersion:
        return None


def _requirements(owner: str, extras: tuple[str, ...] | None = None) -> Iterator[Requirement]:
    """Yield what an installed package requires here, on this Python, with any of these extras."""
    extras = extras or (EXTRAS if owner == "tiercel" else ("",))
    for line in [] if _metadata(owner) is None else metadata.requires(owner) or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if (marker := requirement.marker) is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _field(name: str, field: str) -> str | None:
    """Return a field of a distribution's metadata; None if it is missing, or the package is not installed."""
    found = _metadata(name)
    return found[field] if found is not None and field in found else None


def _metadata(name: str) -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
