"""Made-up distributions, as an installer would leave them."""

from pathlib import Path


def install(directory: Path, name: str, version: str | None, *requires: str) -> None:
    """Metadata alone; on sys.path it hides a real distribution of that name that comes later there."""
    folder = directory / f"{name.replace('-', '_')}-{version or '0'}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", *([f"Version: {version}"] if version else [])]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (folder / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
