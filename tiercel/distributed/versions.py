"""Find the versions of the packages that decide what a run computes."""

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
    """Return the versions of the packages that are installed, by name."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
