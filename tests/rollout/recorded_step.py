"""A step that is recorded and repeated like a CUDA graph: the same operations on the same memory.

What Python computes happens once, at the recording. Operations that only make views are not repeated, because their
memory belongs to other tensors; all others write where they wrote at first.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recorder(TorchDispatchMode):
    """Keeps operations with their tensors, and what tensors held before they were written to."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list[Tensor]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.before += [(tensor, tensor.clone()) for tensor in written]
        result = func(*args, **kwargs)
        is_view = not written and any(each.alias_info is not None for each in func._schema.returns)
        if not is_view:
            made = [] if written else [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.operations.append((func, args, kwargs, made))
        return result


class RecordedStep:
    """In place of a CapturedStep, without a GPU. The recording changes nothing, as a capture does not."""

    captures = 0

    def __init__(self, step, token_ids_R: Tensor, beside: "RecordedStep | None"):
        RecordedStep.captures += 1
        self.token_ids_R = token_ids_R.clone()
        with _Recorder() as recorder:
            self.logits_RV = step(self.token_ids_R)
        self.operations = recorder.operations
        for tensor, value in reversed(recorder.before):
            tensor.copy_(value)

    def __call__(self, token_ids_R: Tensor) -> Tensor:
        self.token_ids_R.copy_(token_ids_R)
        for func, args, kwargs, made in self.operations:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for held, fresh in zip(made, again if made else [], strict=True):
                held.copy_(fresh)
        return self.logits_RV
