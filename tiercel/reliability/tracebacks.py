"""Printing tracebacks without secrets."""

import sys
import threading
import traceback
from types import TracebackType

from tiercel.reliability.redaction import redact


def redact_tracebacks() -> None:
    """Print every traceback that ends this process, or one of its threads, without secrets from now on."""
    sys.excepthook = _print_traceback
    threading.excepthook = _print_thread_traceback


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="", flush=True)


def _print_thread_traceback(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = ended.thread.name if ended.thread is not None else "unknown"
    print(f"Exception in thread {name}:", file=sys.stderr)
    _print_traceback(ended.exc_type, ended.exc_value, ended.exc_traceback)
