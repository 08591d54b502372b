"""Ctrl-C before a run has begun, and output that nobody reads."""

import os
import signal
import subprocess
import sys

import pytest

from tests.web.report.fake_runs import make_grounding
from tiercel.errors import EXIT_INTERRUPTED, EXIT_UNREAD

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


@pytest.mark.parametrize(
    ("options", "words"), [((), ("rollouts", "run")), (("-u",), ("rollouts", "run")), ((), ("rollouts", "--help"))]
)
def test_output_that_nobody_reads_ends_a_command_without_a_word(tmp_path, options, words):
    make_grounding(tmp_path / "run", steps=2, rows=4)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        command = (sys.executable, *options, "-m", "tiercel", *words)
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=closed, stderr=subprocess.PIPE, timeout=600
        )
    assert ended.returncode == EXIT_UNREAD and b"Error" not in ended.stderr
