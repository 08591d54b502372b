"""Fixtures that several packages' tests share."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ARE_DECLARED = find_spec("declared_torchvision_operators") is not None  # by the environment itself
if not ARE_DECLARED and find_spec("torchvision") is not None and not torch.cuda.is_available():
    # torchvision's wheel is built against CUDA; its Python part imports beside a CPU torch once these are declared.
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from tests.tiny_models import FAMILY_NAMES, save_tiny_checkpoint

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TIERCEL_LANG"] = "en"  # whatever the locale of the machine
torch.set_num_threads(1)  # two contend for the cores with the processes that tests start


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Directory of a tiny random checkpoint for each family."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save_tiny_checkpoint(name, root / name) for name in FAMILY_NAMES}
