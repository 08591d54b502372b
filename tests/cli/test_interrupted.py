"""Ctrl-C before a run has begun."""

import signal
import subprocess
import sys

import pytest

from tiercel.errors import EXIT_INTERRUPTED

# Each import of the module, and of those below it, sends the signal, as often as it is asked for. A parent that watched
# the imports from outside could be late: then the signal comes when Python itself is being taken down.
INTERRUPTING = """
import runpy, signal, sys
module, times = sys.argv.pop(1), int(sys.argv.pop(1))

class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        global times
        if name.startswith(module) and times:
            times -= 1
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
runpy.run_module("tiercel", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize("module", ("tiercel.config.schema", "tiercel.cli.main", "tiercel.doctor"))
def test_ctrl_c_while_modules_are_imported_ends_the_command_in_one_line(module, times):
    # A process that a shell runs in the background ignores SIGINT, and so do its children.
    ended = subprocess.run(
        (sys.executable, "-c", INTERRUPTING, module, str(times), "doctor"),
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (ended.returncode, ended.stderr) == (EXIT_INTERRUPTED, "tiercel: interrupted\n")
