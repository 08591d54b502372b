"""Fixtures that the tests of several packages share."""

import os
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ARE_DECLARED = find_spec("declared_torchvision_operators") is not None  # by the environment itself
if not ARE_DECLARED and find_spec("torchvision") is not None and torch.version.cuda is None:
    # torchvision is built against CUDA. Its Python part can be imported next to a CPU build of torch if these are
    # declared.
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TIERCEL_LANG"] = "en"  # whatever the machine's locale
torch.set_num_threads(1)  # two would compete for the cores with the processes that tests start


CORE_CASES = tuple(
    line
    for line in (Path(__file__).parent / "core_cases.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


def pytest_addoption(parser):
    parser.addoption("--third", type=int, choices=(0, 1, 2), help="only the core cases and this third of the others")


def pytest_collection_modifyitems(config, items):
    """If `--third` is given, keep the core cases and that third of the others, by the checksums of their names."""
    third = config.getoption("--third")
    if third is None:
        return
    left_out = [
        item
        for item in items
        if not item.nodeid.startswith(CORE_CASES) and zlib.crc32(item.nodeid.encode()) % 3 != third
    ]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Directory of a tiny random checkpoint for each family."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save_tiny_checkpoint(name, root / name) for name in FAMILY_NAMES}
