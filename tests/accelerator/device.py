"""A pretended accelerator: tensors of the device "pretended", whose numbers are in tensors of the CPU.

It raises an error when a GPU would refuse: for tensors of two devices in one operation. It also raises one when the
host would wait for the device, unless `ALLOWED` (waits.py) has the place: at reads of values, at operations whose
result has a size that only the device knows, and at copies to the device without `non_blocking`. The numbers are real,
so whole runs can use it, and its results can be compared with the CPU's.

PyTorch registers a backend for the whole process, and then reports an accelerator to everyone. So whatever uses this
module runs in its own process (test_accelerator.py).
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from tests.accelerator.waits import ALLOWED

NAME = "pretended"
PACKAGE = "tiercel."
aten = torch.ops.aten

COPY, TO_COPY = aten.copy_.default, aten._to_copy.default
READS = {aten._local_scalar_dense.default, aten.equal.default}
SIZED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_scatter_backward.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
HISTOGRAM = aten.histc.default  # a GPU counts integers too
FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "eye")


class MixedDevices(RuntimeError):
    """Tensors of two devices are in one operation."""


class WaitsForDevice(RuntimeError):
    """The host waits for the device at a place that is not allowed."""


class Waits:
    """Counts the waits for the device by place: the innermost function of the product, and the kind of wait."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self.ever: set[str] = set()  # in this process
        self._late: RuntimeError | None = None

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Start counting again inside."""
        before, self.places = self.places, Counter()
        try:
            yield self.places
        finally:
            before.update(self.places)
            self.places = before

    def note(self, kind: str) -> None:
        """Count a wait. Raises WaitsForDevice if it is not allowed."""
        place = f"{_place()}: {kind}"
        if place not in ALLOWED:
            self.refuse(WaitsForDevice(f"{place}; mend it, or give its reason in tests/accelerator/waits.py"))
        self.places[place] += 1
        self.ever.add(place)

    def refuse(self, error: RuntimeError) -> None:
        """Raise the error. A backward pass has a thread of its own, which an error would abort with the process; the
        next operation of the main thread raises it."""
        if threading.current_thread() is threading.main_thread():
            raise error
        self._late = self._late or error

    def raise_late(self) -> None:
        """Raise what a backward pass was refused."""
        late, self._late = self._late, None
        if late is not None:
            self.refuse(late)


WAITS = Waits()


def _place() -> str:
    """Return the name of the innermost function of the product. A backward pass has its own thread, in which there is
    none."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(PACKAGE):
            return f"{module.removeprefix(PACKAGE)}.{frame.f_code.co_qualname.partition('.<')[0]}"
        frame = frame.f_back
    return "outside" if threading.current_thread() is threading.main_thread() else "backward"


class DeviceTensor(Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.held})"

    def tolist(self) -> Any:
        """Read the values; PyTorch's own method takes no subclass."""
        WAITS.note("read")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        WAITS.raise_late()
        if func is COPY:
            return _copied(*args, **kwargs)
        if func is TO_COPY and torch.device(kwargs.get("device") or NAME).type != NAME:
            WAITS.note("read")
            return func(args[0].held, **kwargs)
        _judge(func, args, kwargs)
        given, named = tree_map(_held, (args, {name: value for name, value in kwargs.items() if name != "device"}))
        if func is HISTOGRAM:
            given = (given[0].float(), *given[1:])
        result = tree_map(_wrapped, func(*given, **named))
        return return_and_correct_aliasing(func, args, kwargs, result)


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, DeviceTensor):
        WAITS.note("read")
    elif not isinstance(source, DeviceTensor) and not non_blocking:
        WAITS.note("upload")
    _held(target).copy_(_held(source))
    return target


def _judge(func: Any, args: Any, kwargs: Any) -> None:
    """Note the waits of an operation, and refuse tensors of two devices."""
    leaves = tree_leaves((args, kwargs))
    if func in READS:
        WAITS.note("read")
    if func in SIZED_BY_VALUES and kwargs.get("output_size") is None:
        WAITS.note("size")
    if func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        is_fill = func is not aten.index.Tensor and args[2].numel() == 1  # a masked_fill, which does not wait
        if any(index.dtype == torch.bool for index in indices) and not is_fill:
            WAITS.note("size")
        if any(not isinstance(index, DeviceTensor) for index in indices):
            WAITS.note("upload")
        leaves = [args[0], *args[2:3]]
    if mixed := [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.ndim
    ]:
        WAITS.refuse(MixedDevices(f"{func} takes a tensor of the CPU of shape {tuple(mixed[0].shape)}"))


def _held(value: Any) -> Any:
    return value.held if isinstance(value, DeviceTensor) else value


def _wrapped(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


class _Module(_DummyBackendModule):
    """What PyTorch, transformers and PEFT ask of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def _factory(name: str) -> Callable[..., DeviceTensor]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(aten, packet), overload or "default")

    def make(*args, device=None, layout=None, pin_memory=None, **kwargs):
        return DeviceTensor(operation(*args, **kwargs))

    return make


def register() -> tuple[torch.device, torch.library.Library]:
    """Register the device for this process, as long as the library that is returned exists."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    for name in FACTORIES:
        library.impl(name, _factory(name), "PrivateUse1")
    library.impl(
        "_copy_from", lambda source, target, non_blocking=False: _copied(target, source, non_blocking), "PrivateUse1"
    )
    return torch.device(NAME), library
