"""`tiercel serve` whose vLLM is a fork of it instead of another Python: in a process with all imports done (that of a
nursery, tests/forked.py) a server starts in seconds. vLLM forks its engine in turn, as it does on GPUs."""

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from vllm import envs

from tests.vllm.servers import LIFE_SECONDS
from tiercel.cli.main import entry_point
from tiercel.rollout.vllm import serving


class Forked(subprocess.Popen):
    """A process that runs `python -m MODULE WORDS` as a fork of this one, in a session of its own."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest: Any) -> None:
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            run_module(args[2:], env, preexec_fn)


def run_module(words: Sequence[str], environment: Mapping[str, str], prepare: Callable[[], None]) -> NoReturn:
    os.setsid()
    prepare()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"  # vLLM asks for "spawn" on a CPU, where each process imports it again
    sys.argv[:] = words
    code = 1
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    signal.alarm(LIFE_SECONDS)
    serving.subprocess = SimpleNamespace(
        Popen=Forked, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    entry_point()
