"""Fixtures that the tests of several packages share."""

import gc
import os
import zlib
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TIERCEL_LANG"] = "en"  # whatever the machine's locale


def listed(name: str) -> tuple[str, ...]:
    """Read a list beside this file: a line each, and comments."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


CORE_CASES = listed("core_cases.txt")
PASSED_OVER = ("benchmarks", "docs", "convert", "messages", "tools")  # by test-lowest: no version changes them
OF_TRACKERS = ("tests/trackers/", "tests/training/test_trackers.py")  # packages that its environment lacks
NOT_WITH_LOWEST = (*(f"tests/{name}/" for name in PASSED_OVER), *OF_TRACKERS)
LONG_FILES = {file: place for place, file in enumerate(listed("long_files.txt"))}


def pytest_addoption(parser):
    parser.addoption(
        "--third", choices=("0", "1", "2", "core"), help="only the core cases and this third of the others"
    )
    parser.addoption("--left-to-lowest", type=int, choices=(0, 1, 2), help="without this third if test-lowest runs it")


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would begin with the files of most tests
    if not getattr(config.option, "numprocesses", None):  # the process that only hands out tests needs no torch
        set_up_torch()


def set_up_torch() -> None:
    import torch

    torch.set_num_threads(1)  # two would compete for the cores with the processes that tests start


def pytest_ignore_collect(collection_path, config):
    """Pass over files without the mark that is asked for, because importing all files takes longer than their tests."""
    mark = config.option.markexpr
    if mark.isidentifier() and collection_path.name.startswith("test_"):
        return f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") or None
    return None


def is_of_third(case: str, third: int | str) -> bool:
    """Say whether a case, given by its name, is a core case or in this third of the others, by its name's checksum; in
    none if the third is `core`."""
    return case.startswith(CORE_CASES) or str(zlib.crc32(case.encode()) % 3) == str(third)


def is_left_to_lowest(case: str, third: int) -> bool:
    """Say whether `make test` may leave a case to `make test-lowest` of this third: all but the core cases and those of
    folders that it passes over or lacks the packages for."""
    return not case.startswith((*CORE_CASES, *NOT_WITH_LOWEST)) and is_of_third(case, third)


def pytest_collection_modifyitems(config, items):
    """Keep the cases of `--third`, if it is given, or those that are not left to the lowest versions, and begin with
    the longest files: a worker takes whole files."""
    third, other = config.getoption("--third"), config.getoption("--left-to-lowest")
    kept = [
        item
        for item in items
        if (third is None or is_of_third(item.nodeid, third))
        and (other is None or not is_left_to_lowest(item.nodeid, other) or item.get_closest_marker("skipif"))
    ]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept
    items.sort(key=lambda item: LONG_FILES.get(item.nodeid.partition("::")[0], len(LONG_FILES)))


def pytest_collection_finish():
    """Keep the collector from searching all that was imported again and again: 3 % of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Directory of a tiny random checkpoint for each family."""
    from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint

    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save_tiny_checkpoint(name, root / name) for name in FAMILY_NAMES}
