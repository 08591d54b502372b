"""The program `tiercel`, which `python -m tiercel` runs too."""

import os
import signal
from types import FrameType
from typing import NoReturn

from tiercel.errors import EXIT_INTERRUPTED


def main() -> None:
    """Run the command line. A Ctrl-C while it is imported ends the process without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, _leave)
    from tiercel.cli.main import entry_point

    signal.signal(signal.SIGINT, before)
    entry_point()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"tiercel: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
