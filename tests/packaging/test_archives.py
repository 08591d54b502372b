"""What is in the wheel and in the sdist, and that the same files give the same bytes."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.conftest import ROOT
from tiercel import __version__

pytestmark = pytest.mark.wheel

INFO = f"tiercel-{__version__}.dist-info"
OF_WHEELS = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
OF_SDISTS = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
LARGEST_BYTES = 20_000_000


def repository_files() -> list[str]:
    """Files of the repository: those of the index, and new ones that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(name for name in names if name and os.path.lexists(ROOT / name))


def package_files() -> set[str]:
    """Files of the package without the recipes, which are a link."""
    return {name for name in repository_files() if name.startswith("tiercel/")} - {"tiercel/demo/recipes"}


def recipe_names() -> set[str]:
    return {name for name in repository_files() if name.startswith("recipes/")}


def test_the_wheel_has_the_package_with_the_demos_recipes_and_nothing_else(wheel):
    demos = {name for name in recipe_names() if re.match(r"recipes/demo-.*\.yaml", name)}
    assert len(demos) >= 5
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    assert len(names) == len(set(names))
    assert set(names) == package_files() | {f"tiercel/demo/{name}" for name in demos} | OF_WHEELS


WEB = ROOT / "tiercel/web"


def test_what_the_package_reads_at_run_time_is_in_the_wheel(wheel):
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    pages = {
        file.relative_to(ROOT).as_posix() for kind in ("html", "css", "js", "svg") for file in WEB.rglob(f"*.{kind}")
    }
    assert len(pages) > 5 and pages <= names
    assert {"tiercel/doctor/pairs.json", "tiercel/doctor/advice.json"} <= names
    assert {"tiercel/py.typed", "tiercel/config/synonyms/keys.txt", "tiercel/convert/peers/trl.txt"} <= names
    starts = {
        f"tiercel/demo/{start}/{file}"
        for start in ("start", "pointing_start")
        for file in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    }
    assert starts <= names
    assert {
        f"tiercel/demo/real_start/{file}" for file in ("parts.safetensors", "adapter/adapter_model.safetensors")
    } <= names
    asked_for = re.findall(r'"([a-z-]+\.yaml)"', "".join(map(read, ("command", "real"))))
    assert {f"tiercel/demo/recipes/{name}" for name in asked_for} <= names and len(asked_for) >= 3


def read(module: str) -> str:
    return (ROOT / f"tiercel/demo/{module}.py").read_text(encoding="utf-8")


def test_the_sdist_has_what_the_wheel_is_built_from(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)  # no links, which an installer may refuse
    names = {member.name.removeprefix(f"tiercel-{__version__}/") for member in members}
    copies = {f"tiercel/demo/{name}" for name in recipe_names()}
    assert names == package_files() | recipe_names() | copies | OF_SDISTS


def test_the_archives_are_small(wheel, sdist):
    assert max(wheel.stat().st_size, sdist.stat().st_size) < LARGEST_BYTES


def test_the_metadata_names_every_extra_and_the_pythons(wheel):
    with ZipFile(wheel) as archive:
        lines = archive.read(f"{INFO}/METADATA").decode().splitlines()
    assert {f"Version: {__version__}", "License-Expression: Apache-2.0", "Requires-Python: <3.14,>=3.10"} <= set(lines)
    (table,) = re.findall(
        r"^\[project\.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras == set(re.findall(r"^([a-z-]+) = \[", table, re.M))


def test_another_copy_of_the_files_gives_the_same_bytes(wheel, sdist, tmp_path):
    """The copy has other times and permissions, and the wheel is built from it and not from the sdist."""
    tree = tmp_path / "tree"
    for name in repository_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
        if not (tree / name).is_symlink():
            (tree / name).chmod(0o600)
            os.utime(tree / name, (0, 10**9))
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--sdist",
        "--wheel",
        "--outdir",
        str(tmp_path / "dist"),
        str(tree),
    ]
    other = {**os.environ, "TZ": "Asia/Shanghai", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    subprocess.run(build, cwd=tmp_path, env=other, capture_output=True, check=True)
    for archive in (wheel, sdist):
        assert digest(tmp_path / "dist" / archive.name) == digest(archive), archive.name


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
