"""A process that never closes its loader: test_loader.py."""

import os
import signal
import sys

import torch

from tests.data.test_loader import ORDER, ROWS
from tiercel.data.loader import StepLoader


def large(row, index):
    return torch.zeros(10_000_000, dtype=torch.uint8)


if __name__ == "__main__":
    loader = StepLoader(ROWS, large, ORDER, start=0, stop=7, workers=2)
    next(loader)
    print(*(process.pid for process, _ in loader.workers.processes), flush=True)
    if sys.argv[1] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit
