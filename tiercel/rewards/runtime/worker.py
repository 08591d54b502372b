"""Run one reward function of the user in its own process, which supervisor.py forks; training never imports this file.

The process reads one JSON line per batch from its socket, replies that it has begun, and sends one JSON line per sample
as soon as that sample is scored. Standard output and error belong to the user's code. Imports torch only if that code
does. `serve` is the part that it shares with the process of an environment.
"""

import asyncio
import errno
import faulthandler
import importlib.util
import inspect
import json
import math
import numbers
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from types import ModuleType
from typing import Any

from tiercel import user_functions
from tiercel.message_text import brief, counted
from tiercel.reliability.redaction import redact
from tiercel.reward_types import Sample
from tiercel.rewards.runtime import signature_adapters
from tiercel.rewards.runtime.wire import LARGEST_VALUE, decode_sample
from tiercel.sandbox.supervisor import file_limit
from tiercel.user_functions import CALL_FORM, CannotLoad, functions_of, load_module

TRACEBACK_LINES = 20
MODULE_PREFIX = "tiercel_reward"
_OWN_MODULES = (__name__, user_functions.__name__, signature_adapters.__name__, "tiercel.environments.worker")
LONGEST_FAILURE = 4000  # characters

Report = Callable[[int, Mapping[str, Any]], None]
Reply = Callable[..., None]  # sends its keyword arguments as one line
Handle = Callable[[Any, Reply], None]  # answers one request


def run(descriptor: int, work: Mapping[str, Any], file_mb: float) -> None:
    """Score batches of samples with the function that `call` of `work` names, given its `arguments`."""

    def load() -> Handle:
        function = load_function(work["call"], work["arguments"])
        loop = asyncio.new_event_loop()  # one loop for the life of the worker, so that clients may keep connections

        def handle(batch: Any, reply: Reply) -> None:
            samples = [decode_sample(fields) for fields in batch]
            reply(begun=True)
            score_batch(function, samples, loop, lambda index, fields: reply(index=index, **fields))

        return handle

    serve(descriptor, load, file_mb)


def serve(descriptor: int, load: Callable[[], Handle], file_mb: float) -> None:
    """Load the user's code, report it, then answer requests until the other side closes the socket. `load` may raise
    CannotLoad."""
    _limit_files(file_mb)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # process.py uses it to ask where the code hangs
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    own = os.getpid()

    def reply(**fields: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # this is a child that the user's function forked, and that returned from it
        channel.sendall(json.dumps(fields).encode() + b"\n")

    try:
        handle = load()
    except CannotLoad as error:
        reply(problem=str(error))
        return
    reply(problem=None)
    with channel.makefile("rb") as requests:
        for request in requests:
            handle(json.loads(request), reply)


def _limit_files(file_mb: float) -> None:
    """Forbid core dumps, and limit the size of each file. Python ignores SIGXFSZ, so a write beyond the limit raises
    OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit, (_, hard) = round(file_mb * 1e6), resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def load_function(call: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Load what scores samples, as `file.py:function` or `package.module:function` names it, and give it its further
    arguments. Raises CannotLoad.

    A file's own directory, or for a module the working directory, comes first on the import path.
    """
    source, name, found = load_named(call, _load_with_stand_in)
    try:
        return signature_adapters.as_reward(found, arguments)
    except signature_adapters.NoReward as error:
        raise CannotLoad(f"{source}: {name} {error}") from error
    except BaseException as error:  # from the constructor of a class
        raise CannotLoad(f"{source}: {name} cannot be created:\n{failure_text(error)}") from error


def load_named(call: str, load: Callable[[str], ModuleType]) -> tuple[str, str, Callable[..., Any]]:
    """Return the source and the name in `call`, and the callable that they name; `load` imports the source. Raises
    CannotLoad."""
    source, _, name = call.rpartition(":")
    if not source or not name.isidentifier():
        raise CannotLoad(f"got {call!r}; use {CALL_FORM}")
    try:
        module = load(source)
    except CannotLoad:
        raise
    except BaseException as error:  # whatever the user's code raises
        raise CannotLoad(f"{source} cannot be imported for its function {name}:\n{failure_text(error)}") from error
    found = getattr(module, name, _registered(module, name))
    if found is None or not callable(found):
        there = ", ".join(dict.fromkeys([*functions_of(module), *_registrations(module)])) or "none"
        if found is None:
            raise CannotLoad(f"{source} has no function {name}; its functions are: {there}")
        raise CannotLoad(f"{source} has a {name} that is not a function; its functions are: {there}")
    return source, name, found


def _registered(module: ModuleType, name: str) -> Any:
    """Return what an ms-swift plugin has registered under that name."""
    orms = getattr(module, "orms", None)
    return orms.get(name) if isinstance(orms, dict) else None


def _registrations(module: ModuleType) -> list[str]:
    """List the names under which an ms-swift plugin has registered its own objects."""
    orms = getattr(module, "orms", None)
    known = orms.items() if isinstance(orms, dict) else ()
    return [str(name) for name, value in known if getattr(value, "__module__", None) == module.__name__]


def _load_with_stand_in(source: str) -> ModuleType:
    """Load the module. If it needs ms-swift, which is not installed, provide stand-ins for what plugins need."""
    try:
        return load_module(source, MODULE_PREFIX)
    except ImportError as error:
        if not signature_adapters.is_swifts(error) or importlib.util.find_spec("swift") is not None:
            raise
    signature_adapters.stand_in_for_swift()
    try:
        return load_module(source, MODULE_PREFIX)
    except ImportError as error:
        if not signature_adapters.is_swifts(error):
            raise
        provided = ", ".join(signature_adapters.STOOD_IN)
        raise CannotLoad(
            f"{source} imports more from ms-swift, which is not installed, than {provided} of "
            f"swift.plugin or swift.rewards ({error}); remove that import, or install ms-swift"
        ) from error


def score_batch(
    function: Callable[..., Any], samples: Sequence[Sample], loop: asyncio.AbstractEventLoop, report: Report
) -> None:
    """Call the user's function for every sample and report each by its index, once: its value, or its failure.

    Whatever the function raises is a failure, even KeyboardInterrupt and the like.
    """
    if getattr(function, "batched", False):
        try:
            values = function(list(samples))
            values = loop.run_until_complete(values) if inspect.isawaitable(values) else values
            replies = [checked_value(value) for value in _as_list(values, len(samples))]
        except BaseException as error:
            replies = [{"failure": failure_text(error)}] * len(samples)
        for index, fields in enumerate(replies):
            report(index, fields)
    elif inspect.iscoroutinefunction(function):
        calls = (_score_async(function, index, sample, report) for index, sample in enumerate(samples))
        loop.run_until_complete(_gather(calls))
    else:
        for index, sample in enumerate(samples):
            try:
                fields = checked_value(function(sample))
            except BaseException as error:
                fields = {"failure": failure_text(error)}
            report(index, fields)


async def _gather(calls: Iterator[Any]) -> None:
    await asyncio.gather(*calls)


async def _score_async(function: Callable[..., Any], index: int, sample: Sample, report: Report) -> None:
    try:
        fields = checked_value(await function(sample))
    except BaseException as error:
        fields = {"failure": failure_text(error)}
    report(index, fields)


def _as_list(values: Any, expected: int) -> list[Any]:
    if hasattr(values, "tolist"):  # arrays and tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(f"a batched reward must return a list, not a {type(values).__name__}")
    if len(values) != expected:
        raise ValueError(
            f"returned {counted(len(values), 'value')} for {counted(expected, 'sample')}, but a batched reward must "
            "return one per sample"
        )
    return list(values)


def checked_value(value: Any) -> dict[str, Any]:
    """Make the reply for an answer: a finite number (True is 1, False 0), None, or a failure that describes the
    answer."""
    if value is None:
        return {"value": None}
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a number in an array or a tensor
    if not isinstance(value, numbers.Real | Decimal):
        return {
            "failure": (
                f"returned {_brief(value)}, a {type(value).__name__}, but a reward must return a number or None"
            )
        }
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_VALUE:  # NaN fails this too
        return {
            "failure": (
                f"returned {_brief(number)}, but a reward must return a finite number, or None if it does not apply"
            )
        }
    return {"value": number}


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # raised by the user's own __repr__
        text = object.__repr__(value)
    return brief(text, 80)


def failure_text(error: BaseException) -> str:
    """Return the tail of an exception's traceback, without the worker's own frames and without secrets."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _OWN_MODULES:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    text = redact("\n".join(text.splitlines()[-TRACEBACK_LINES:]))[-LONGEST_FAILURE:]
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        text += f"\n{file_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[0] / 1e6)}"
    return text
