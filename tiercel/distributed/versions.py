"""Packages whose versions decide what a run computes."""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "tiercel",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "safetensors",
    "pillow",
    "numpy",
    "pydantic",
    "vllm",
    "deepspeed",
)


def installed_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
