"""The process that runs one reward function of the user's: started by process.py, never imported by training.

It reads one JSON line per batch from a socket of its own and answers one JSON line per sample as soon as that sample
is scored. Standard output and error belong to the user's code. Imports no torch unless that code does.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tiercel.reliability.redaction import redact
from tiercel.rewards.wire import LARGEST_VALUE, decode_sample
from tiercel.samples import Sample

TRACEBACK_LINES = 20
LONGEST_FAILURE = 4000  # characters

Answer = Callable[[int, Any], None]
Fail = Callable[[int, str], None]


class CannotLoad(ValueError):
    """The user's file, module or function cannot be loaded; the message says why and what there is."""


def main(descriptor: int, call: str) -> None:
    """Load `call`, say so, then answer batches until the other side closes the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # process.py asks where a hang is
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(channel, requests), daemon=True).start()

    def reply(**fields: Any) -> None:
        channel.sendall(json.dumps(fields).encode() + b"\n")

    try:
        function = load_function(call)
    except CannotLoad as error:
        reply(problem=str(error))
        return
    reply(problem=None)
    loop = asyncio.new_event_loop()  # one for the life of the worker, so that clients may keep connections
    while True:
        samples = [decode_sample(fields) for fields in json.loads(requests.get())]
        score_batch(
            function,
            samples,
            loop,
            answer=lambda index, value: reply(index=index, **_checked(value)),
            fail=lambda index, failure: reply(index=index, failure=failure),
        )


def _read_requests(channel: socket.socket, requests: queue.SimpleQueue[bytes]) -> None:
    """Hand on each line; when the other side is gone, end this process and all that the user's code started."""
    with contextlib.suppress(OSError), channel.makefile("rb") as lines:
        for line in lines:
            requests.put(line)
    os.killpg(os.getpid(), signal.SIGKILL)


def load_function(call: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names. Raises CannotLoad.

    A file's own directory, or for a module the working directory, comes first on the import path.
    """
    source, _, name = call.rpartition(":")
    if not source or not name.isidentifier():
        raise CannotLoad(f"{call!r} given; write file.py:function or package.module:function")
    try:
        module = _load_module(source)
    except CannotLoad:
        raise
    except (Exception, SystemExit) as error:
        raise CannotLoad(f"{source} cannot be imported for its function {name}:\n{failure_text(error)}") from error
    function = getattr(module, name, None)
    if function is None or not callable(function):
        found = ", ".join(_functions_of(module)) or "none"
        kind = "no function" if function is None else "no function, but something else, called"
        raise CannotLoad(f"{source} has {kind} {name}; its functions are: {found}")
    return function


def _load_module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(source)
    path = Path(source).absolute()
    if not path.is_file():
        raise CannotLoad(f"{path} is no file; paths start at the working directory")
    sys.path.insert(0, str(path.parent))
    module_name = f"tiercel_reward_{path.stem}"  # a reward called json.py must not hide json
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the file look themselves up there
    spec.loader.exec_module(module)
    return module


def _functions_of(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def score_batch(
    function: Callable[..., Any],
    samples: Sequence[Sample],
    loop: asyncio.AbstractEventLoop,
    *,
    answer: Answer,
    fail: Fail,
) -> None:
    """Call the user's function for every sample and report each by its index, once, through `answer` or `fail`."""
    is_async = inspect.iscoroutinefunction(function)
    if getattr(function, "batched", False):
        try:
            values = loop.run_until_complete(function(list(samples))) if is_async else function(list(samples))
            values = _as_list(values, len(samples))
        except (Exception, SystemExit) as error:
            for index in range(len(samples)):
                fail(index, failure_text(error))
            return
        for index, value in enumerate(values):
            answer(index, value)
    elif is_async:
        calls = (_score_async(function, index, sample, answer, fail) for index, sample in enumerate(samples))
        loop.run_until_complete(_gather(calls))
    else:
        for index, sample in enumerate(samples):
            try:
                value = function(sample)
            except (Exception, SystemExit) as error:
                fail(index, failure_text(error))
            else:
                answer(index, value)


async def _gather(calls: Iterator[Any]) -> None:
    await asyncio.gather(*calls)


async def _score_async(function: Callable[..., Any], index: int, sample: Sample, answer: Answer, fail: Fail) -> None:
    try:
        value = await function(sample)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        fail(index, failure_text(error))
    else:
        answer(index, value)


def _as_list(values: Any, expected: int) -> list[Any]:
    if hasattr(values, "tolist"):  # arrays and tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(f"a batched reward answers a list, not a {type(values).__name__}")
    if len(values) != expected:
        raise ValueError(f"{len(values)} answers for {expected} samples; a batched reward answers one per sample")
    return list(values)


def _checked(value: Any) -> dict[str, Any]:
    """The reply for an answer: a finite number (True is 1, False 0), None, or a failure that says what it is."""
    if value is None:
        return {"value": None}
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number in an array's or a tensor's clothes
    if not isinstance(value, numbers.Real):
        return {"failure": f"answered {_brief(value)}, a {type(value).__name__}; a reward answers a number or None"}
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_VALUE:  # NaN fails this too
        return {
            "failure": f"answered {_brief(number)}; a reward answers a finite number, or None where it does not apply"
        }
    return {"value": number}


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # the user's own __repr__
        text = object.__repr__(value)
    return text if len(text) <= 80 else text[:77] + "..."


def failure_text(error: BaseException) -> str:
    """The tail of an exception's traceback, without this file's frames and without secrets."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return redact("\n".join(text.splitlines()[-TRACEBACK_LINES:]))[-LONGEST_FAILURE:]
