"""Protection of this process's environment from processes that run the user's code, on Linux.

A process may read /proc/PID/environ, the memory and the open files of another process of the same user, unless that one
is "not dumpable". With some capabilities root may read them all the same, so the user's code is started without these.
A process that is not dumpable leaves no core dump, and debuggers such as py-spy need CAP_SYS_PTRACE to inspect it.
"""

import ctypes
import os
import sys

from tiercel.reliability.redaction import secret_values

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 4, 24
_READING = (19, 21, 38)  # CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON
_CAPABILITY_VERSION_3 = 0x20080522


def prctl(option: int, argument: int) -> None:
    """Change a property of this process; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0)))


def keep_private() -> None:
    """Make this process unreadable for the user's other processes if its environment contains a secret."""
    if secret_values(os.environ):
        prctl(_PR_SET_DUMPABLE, 0)


def give_up_reading_others() -> None:
    """Drop the capabilities by which root reads other processes, for this process and all that it starts."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: of capabilities 0 to 31, then of 32 to 63
    if libc.capget(header, sets) != 0:
        return
    for number in _READING:
        prctl(_PR_CAPBSET_DROP, number)
        word, bit = divmod(number, 32)
        for place in range(3 * word, 3 * word + 3):
            sets[place] &= ~(1 << bit)
    libc.capset(header, sets)
