"""Ctrl-C before a run has begun."""

import signal
import subprocess
import sys

import pytest

from tiercel.errors import EXIT_INTERRUPTED


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize("module", ("tiercel.config.schema", "tiercel.cli.main", "tiercel.doctor"))
def test_ctrl_c_while_modules_are_imported_ends_the_command_in_one_line(module, times):
    command = (sys.executable, "-X", "importtime", "-m", "tiercel", "doctor")
    said = []
    # A process that a shell runs in the background ignores SIGINT, and so do its children.
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith("import time:"):
                said.append(line)
            elif line.rsplit("|", 1)[1].strip().startswith(module) and times:
                process.send_signal(signal.SIGINT)
                times -= 1
    assert process.returncode == EXIT_INTERRUPTED and said == ["tiercel: interrupted\n"]
