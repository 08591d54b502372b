"""An evaluation that is killed before it writes that its second batch is done: test_evaluate.py."""

import os
import signal
import sys

from tiercel.cli.main import main
from tiercel.runs import evaluation_groups
from tiercel.training import evaluation


def killed(file, text, write=evaluation_groups.write_atomically):
    if '"batches": 2' in text:
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, text)


if __name__ == "__main__":
    evaluation.ROWS_AT_ONCE, evaluation_groups.write_atomically = 4, killed
    main(sys.argv[1:])
